"""The timeline: whole lines, also across a full disk."""

import errno
import json
import os
from pathlib import Path

import pytest

from producer.timeline import Timeline


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_a_full_disk_leaves_out_whole_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, room, write = tmp_path / "timeline.jsonl", [10_000], os.write

    def limited(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", limited)
    with Timeline(path) as timeline:
        timeline.record("first")
        room[0] = 12  # in the middle of a line
        timeline.record("left out")
        timeline.record("left out, too")
        room[0] = 10_000
        timeline.record("third")
    assert events(path) == ["first", "third"]


def test_any_other_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Timeline(tmp_path / "timeline.jsonl") as timeline:
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(OSError, match="Input/output error"):
            timeline.record("first")
