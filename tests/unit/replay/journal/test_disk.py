"""The guard says no while the disk is too full, yes again by itself, and keeps a reserve for the worst moment."""

import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from replay.journal.retention import RESERVE_BYTES, DiskGuard
from replay.journal.writer import Journal
from tests.unit.replay.builders import entry


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of 1000 bytes, 100 of them for root alone, 500 used."""
    usage = SimpleNamespace(total=1000, used=500, free=400)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    return usage


def test_the_used_share_is_that_of_df(tmp_path: Path, disk: SimpleNamespace) -> None:
    guard = DiskGuard(tmp_path, 0.9)
    assert guard.used == pytest.approx(500 / 900)
    disk.free = 0
    assert guard.used == 1.0
    disk.used = 0
    assert guard.used == 1.0, "a disk without any room is full, not empty"


def test_it_says_no_above_the_limit_and_yes_again_below(
    tmp_path: Path, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    guard = DiskGuard(tmp_path, 0.75)
    answers = []
    for used in (500, 675, 676, 700, 675, 100):
        disk.used, disk.free = used, 900 - used
        guard.check()
        answers.append(guard.has_room)
    assert answers == [True, True, False, False, True, True]
    assert caplog.messages == [
        "the disk of run_dir is 75% full: no leases until there is room (replay.max_disk_used)",
        "the disk of run_dir is 75% full: leases are given again",
    ]


def test_the_reserve_takes_real_room_and_comes_back_when_there_is_room(tmp_path: Path, disk: SimpleNamespace) -> None:
    guard = DiskGuard(tmp_path, 0.9)
    reserve = tmp_path / "journal.reserve"
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    disk.used, disk.free = 890, 10
    guard.check()
    guard.spend_reserve()
    guard.spend_reserve()
    assert not reserve.exists()
    guard.check()
    assert not reserve.exists()
    disk.used, disk.free = 100, 800
    guard.check()
    assert reserve.stat().st_size == RESERVE_BYTES


def test_two_commits_of_32_groups_of_50_kb_fit_into_the_reserve(journal: Journal, tmp_path: Path) -> None:
    def taken() -> int:
        return sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())

    before = taken()
    for first in (0, 32):
        journal.append([entry(prompt, frame=bytes(50_000)) for prompt in range(first, first + 32)])
    needed = taken() - before
    DiskGuard(tmp_path, 1.0)
    reserve = (tmp_path / "journal.reserve").stat()
    assert 2 * 32 * 50_000 < needed < min(reserve.st_size, reserve.st_blocks * 512)


def test_no_room_for_the_reserve_leaves_no_part_of_it(
    tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        os.write(descriptor, b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    guard = DiskGuard(tmp_path, 0.9)
    assert guard.has_room
    assert list(tmp_path.iterdir()) == []
