"""The timeline: whole lines, also across a full disk."""

import errno
import json
import os
from pathlib import Path

import pytest

from producer.timeline import Timeline
from protocol.files.rotated_lines import older, paths


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
    timeline = Timeline(path)
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

    timeline = Timeline(tmp_path / "timeline.jsonl")
    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(OSError, match="Input/output error"):
        timeline.record("first")


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
