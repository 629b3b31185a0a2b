"""The timeline: a full disk leaves lines out and ends nothing, and old timelines go."""

import errno
import json
import os
from pathlib import Path

import pytest

from producer.timeline import Timeline
from protocol.files.rotated_lines import older, paths


def test_a_full_disk_leaves_whole_lines_out_and_any_other_error_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int, data: bytes) -> int:
        if data.startswith(b"{"):
            return write(file, data[:9])  # and the next byte finds the disk so
        raise OSError(number, os.strerror(number))

    write, path = os.write, tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    timeline.record("first", version=3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", broken)
        number = errno.ENOSPC
        timeline.record("left out")
        number = errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            timeline.record("lost")
    timeline.record("third")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line.get("version")) for line in lines] == [("first", 3), ("third", None)]
    assert lines[0]["t"] <= lines[1]["t"]


def test_of_producers_that_ended_long_ago_the_newest_timelines_stay(tmp_path: Path) -> None:
    names = [f"producer-host-{number}-ab.jsonl" for number in range(70)]
    for number, name in enumerate(names):
        for path in (tmp_path / name, older(tmp_path / name)):
            path.touch()
            os.utime(path, (1e9 + number, 1e9 + number))
    for name in names[:2]:
        os.utime(tmp_path / name)  # in use
    Timeline(tmp_path / "producer-host-99-ab.jsonl")
    kept = [path.name for path in paths(tmp_path, "producer-*.jsonl")]
    assert kept == sorted([*names[:2], *names[8:]])
    assert sorted(tmp_path.iterdir()) == sorted(
        path for name in kept for path in (tmp_path / name, older(tmp_path / name))
    )
