"""The timeline: a full disk leaves lines out and ends nothing, and old timelines go."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from producer.app.timeline import Timeline
from protocol.runtime.json_lines import older, paths


def test_a_full_disk_leaves_whole_lines_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, data: bytes) -> int:
        if data.startswith(b"{"):
            return write(file, data[:9])  # and the next byte finds the disk so
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, path = os.write, tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    timeline.record("first", version=3)
    with monkeypatch.context() as patched:
        timeline.flush()
        patched.setattr(os, "write", broken)
        timeline.record("left out")
        timeline.flush()
    timeline.record("third")
    timeline.flush()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line.get("version")) for line in lines] == [("first", 3), ("third", None)]
    assert lines[0]["t"] <= lines[1]["t"]


def test_a_disk_that_fails_is_the_error_of_the_next_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    timeline = Timeline(tmp_path / "timeline.jsonl")
    monkeypatch.setattr(os, "write", broken)
    timeline.record("lost")
    timeline.flush()
    with pytest.raises(OSError, match="Input/output error"):
        timeline.record("refused")


def test_a_disk_that_stands_still_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, write = threading.Event(), os.write

    def slow(file: int, data: bytes) -> int:
        assert moves.wait(20)
        return write(file, data)

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr("producer.app.timeline._MAX_WAITING", 3)
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    timeline.record("written", number=0)
    while timeline._waiting:  # until the thread has it
        time.sleep(0.001)
    for number in range(1, 9):
        timeline.record("waits", number=number)
    timeline.flush(0.0)
    moves.set()
    timeline.flush()
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


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
