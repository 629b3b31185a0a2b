"""Lines of JSON: always one line, always JSON, always whole."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.runtime.files import ignore_disk_full
from protocol.runtime.json_lines import append, encode_line, forget_after, open_to_append

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.long
@settings(max_examples=40)
@given(st.dictionaries(st.text(st.characters()), ANYTHING, max_size=4))
def test_a_line_is_one_line_of_json_whatever_it_holds(values: dict) -> None:
    line = encode_line(values)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_what_json_has_no_word_for() -> None:
    line = encode_line({"a": math.nan, "b": [1.5, -math.inf], "c": {"d": (math.inf, 2)}, "e": Path("/tmp/x")})
    assert json.loads(line) == {"a": None, "b": [1.5, None], "c": {"d": [None, 2]}, "e": "/tmp/x"}


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_line_that_does_not_fit_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    left, write = [room], os.write

    def limited(file: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, data[: left[0]])
        left[0] -= count
        return count

    file = open_to_append(tmp_path / "lines")
    append(file, b"first\n")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", limited)
        with ignore_disk_full():
            append(file, b"second\n")
    append(file, b"third\n")
    os.close(file)
    assert (tmp_path / "lines").read_bytes() == b"first\nthird\n"


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        (b'{"step": 3}\n{"step": 4}\n', 3),
        (b'{"step": 3}', 2),  # killed while it wrote
        (b"\0\0\0\0\n", 2),  # after a power cut
        (b'{"other": 3}\n{"step": 3}\n', 2),
        (b"", 2),
    ],
)
def test_later_steps_and_damaged_lines_are_cut_off(tmp_path: Path, tail: bytes, kept: int) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    forget_after(path, 3)
    forget_after(tmp_path / "absent", 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, kept + 1))
