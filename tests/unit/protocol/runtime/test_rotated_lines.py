"""Rotated lines: bounded, whole, and read as one file also while they are written."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from protocol.runtime.json_lines import RotatedLines, older, opened, paths, read, read_end


def line(step: int) -> bytes:
    return json.dumps({"step": step, "text": "x" * 20}).encode() + b"\n"


SIZE = len(line(10))  # of any with two digits


def steps(path: Path) -> list[int]:
    return [found["step"] for found in read(path)]


def write(path: Path, *numbers: int, max_bytes: int = 4 * SIZE) -> RotatedLines:
    lines = RotatedLines(path, max_bytes)
    for step in numbers:
        lines.append(line(step))
    return lines


def test_a_full_file_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert read(path) == []
    for last in range(10, 40):
        write(path, last)
        kept = steps(path)
        assert kept == list(range(kept[0], last + 1)), "the newest, in order"
        assert min(last - 9, 5) <= len(kept) <= 8
        assert all(file.stat().st_size <= 4 * SIZE for file in tmp_path.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["steps.1.jsonl", "steps.jsonl"]
    assert paths(tmp_path, "steps*.jsonl") == [path]


def test_what_is_appended_at_once_stays_together_also_where_it_is_more_than_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = write(path, 10)
    lines.append(b"".join(map(line, range(11, 30))))
    lines.append(line(30))
    assert steps(path) == list(range(11, 31))
    assert (older(path).stat().st_size, path.stat().st_size) == (19 * SIZE, SIZE)


def test_lines_of_steps_that_a_crash_undid_go_in_both_files(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for last_kept in range(10, 17):
        lines = write(path, *range(10, 16))
        lines.forget_after(last_kept)
        lines.append(line(last_kept + 1))
        assert steps(path) == [*range(10, min(last_kept, 15) + 1), last_kept + 1]
        for file in tmp_path.iterdir():
            file.unlink()


def test_a_kill_between_the_rename_and_the_new_file_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 10, 11)
    path.rename(older(path))
    assert steps(path) == [10, 11]
    write(path, 12)
    assert steps(path) == [10, 11, 12]


@pytest.mark.parametrize("refuses", ["write", "open"])
def test_on_a_full_disk_nothing_is_appended_and_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    path = tmp_path / "steps.jsonl"
    lines = write(path, 10, 11, 12, 13)
    with monkeypatch.context() as patched:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(os, refuses, full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                lines.append(line(14))
    lines.append(line(14))
    assert steps(path) == [10, 11, 12, 13, 14]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 10)
    with path.open("ab") as file:
        file.write(line(11)[:-1])
    assert steps(path) == [10]


@pytest.mark.parametrize("num_lines", [1, 3, 4, 6])
def test_the_end_is_read_across_both_files(tmp_path: Path, num_lines: int) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, *range(10, 16))  # four in the older file, two in the other
    for spare in (1, SIZE - 1):
        found = [json.loads(one)["step"] for one in read_end(path, num_lines * SIZE + spare)]
        assert found == list(range(16 - num_lines, 16))
    assert [json.loads(one)["step"] for one in read_end(path, 10**6)] == list(range(10, 16))
    assert read_end(tmp_path / "absent", 100) == []


def test_a_rotation_between_the_opening_of_the_two_files_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    lines, rotations, open_file = write(path, *range(10, 16)), iter(range(16, 19)), Path.open

    def open_after_rotation(place: Path, mode: str) -> Any:
        if place == older(path):
            for step in rotations:
                lines.append(line(step))
        return open_file(place, mode)

    monkeypatch.setattr(Path, "open", open_after_rotation)
    with opened(path) as files:
        found = [json.loads(one)["step"] for file in files for one in file]
    assert found == list(range(14, 19))
