"""Commits without a wire: what the disk can do, and what the journal makes of it.

Guarantee: all series write the same frames, one durable commit per batch (`NormalJournal` excepted), one commit after the
other, each to a file of its own in one folder. They take turns, a fraction of a second each, so that a slow phase of the
disk hits all of them alike; a rate is the median over the turns.
"""

import itertools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import apsw
import numpy as np

from benchmarks.groups import GroupFactory
from replay.journal.schema import JournalEntry
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.rerolls import Grade

BATCHES = (1, 8, 32)
RAW, FULL, NORMAL = "raw append + fdatasync", "journal (FULL)", "journal (NORMAL)"
_TURN_S = 0.4
_MIXED = Grade("mixed", 8, 4)

Frames = list[tuple[int, bytes]]  # number of the group, and its message


class NormalJournal(Journal):
    """A journal that does not wait for the disk at a commit. For comparison: a power cut loses what it acknowledged."""

    def _open(self) -> apsw.Connection:
        db = super()._open()
        db.pragma("synchronous", "normal")
        return db


@dataclass
class Series:
    """Commits of one kind and size. `turns` has the seconds of every commit, by turn."""

    kind: str
    batch: int
    commit: Callable[[Frames], None]
    turns: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> np.ndarray:
        return np.concatenate([np.array(turn) for turn in self.turns])

    @property
    def groups_per_s(self) -> float:
        return float(np.median([self.batch * len(turn) / sum(turn) for turn in self.turns]))


def commits(folder: Path, duration_s: float) -> list[Series]:
    """Measures for about `duration_s`, on the disk of `folder`."""
    with ExitStack() as stack:
        all_series = [Series(RAW, batch, _raw_append(folder / f"raw-{batch}", stack)) for batch in BATCHES]
        for name, kind in ((FULL, Journal), (NORMAL, NormalJournal)):
            for batch in BATCHES:
                journal = kind(folder / f"{kind.__name__}-{batch}" / "journal.sqlite")
                stack.callback(journal.close)
                all_series.append(Series(name, batch, partial(_journal_append, journal)))
        all_series.sort(key=lambda series: series.batch)
        numbers = itertools.count()
        factory = GroupFactory(seed=0)
        for series in all_series:
            _turn(series, factory, numbers)
            series.turns.clear()  # it made its file
        ends_at = time.monotonic() + duration_s
        while time.monotonic() < ends_at:
            for series in all_series:
                _turn(series, factory, numbers)
    return all_series


def raw_appends(folder: Path, duration_s: float) -> np.ndarray:
    """Seconds of each durable append of one group, one after the other for that long."""
    with ExitStack() as stack:
        series = Series(RAW, 1, _raw_append(folder / "raw", stack))
        numbers, factory = itertools.count(), GroupFactory(seed=0)
        while not series.turns or series.seconds.sum() < duration_s:
            _turn(series, factory, numbers)
    return series.seconds


def _raw_append(path: Path, stack: ExitStack) -> Callable[[Frames], None]:
    """Appends to a file, then fdatasync: the least that durability costs."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    stack.callback(os.close, descriptor)

    def commit(frames: Frames) -> None:
        for _, frame in frames:
            os.write(descriptor, frame)
        os.fdatasync(descriptor)

    return commit


def _journal_append(journal: Journal, frames: Frames) -> None:
    """As the trainer does."""
    journal.append(
        JournalEntry(LeaseId(Key(0, number), 1, "bench"), "bench", 0, "accepted", 0.5, _MIXED, 4096, frame)
        for number, frame in frames
    )


def _turn(series: Series, factory: GroupFactory, numbers: "itertools.count[int]") -> None:
    seconds: list[float] = []
    while sum(seconds) < _TURN_S:
        frames = [(n, factory.frame(f"0-{n}-0-1-bench")) for n in itertools.islice(numbers, series.batch)]
        started = time.perf_counter()
        series.commit(frames)
        seconds.append(time.perf_counter() - started)
    series.turns.append(seconds)
