"""Sources of batches: the rollout buffer, or the journal of a run that is trained again without producers.

Guarantee: exactly the batches that were cut, in order. Of a journal they are those of the surviving lineage and nothing else:
with the same configuration, on the same kind of CPU and in float32, every checkpoint comes out bit for bit as in the recorded
run. A feed ends a run by raising: `StopRequested` after a signal, at a step boundary; `NoSignalError` when what came gives
nothing to learn from, `PolicyRefusedError` when no producer serves what is needed, `StalledError` when nothing usable came for
too long; whatever ended the intake thread.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from consumer.learn.run_facts import check_same_batches
from consumer.link.gpu_turns import GpuTurns
from consumer.link.intake import Intake
from consumer.waiting import StopRequested, WaitPolicy
from protocol.errors import JournalError, StalledError
from replay.batch_selection import TrainingBatch, count_batch
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape
from replay.journal.reader import JournalReader
from replay.journal.schema import MicroBatchPlan
from replay.sources import ONE, Sources

_POLL_S = 0.25
_Found = TypeVar("_Found")


@dataclass(eq=False)
class BatchFeed:
    """Iterates over the batches of a run. Where the GPU is shared it is a `SharedDevice`.

    Args:
        turns: on the GPU, which is the trainer's only while there are batches; None: it is always.
    """

    buffer: RolloutBuffer
    intake: Intake
    waits: WaitPolicy
    turns: GpuTurns | None = None
    wait_s: float = 0.0  # spent on the last batch
    last: TrainingBatch | None = None
    _waits_since: float | None = None  # None: nothing waits

    def __iter__(self) -> Iterator[TrainingBatch]:
        while True:
            self.waits.check()
            self.intake.check_refused()
            self.last = self._wait_for(self._attempt)
            self.wait_s, self._waits_since = self.waiting_s(), None
            self.intake.wake()  # a batch was cut: there is room for leases
            yield self.last

    def await_turn(self) -> None:
        """Return when the GPU is the trainer's: as soon as there is a batch."""
        if self.turns is not None:
            self._wait_for(lambda: self._has_turn() or None)

    def leave(self) -> None:
        if self.turns is not None:
            self.turns.hand_over()

    def waiting_s(self) -> float:
        """Return the seconds of the wait in progress, 0 if there is none. Any thread may call it."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def _wait_for(self, attempt: Callable[[], _Found | None]) -> _Found:
        self._waits_since = self._waits_since or time.monotonic()

        def attempt_or_end() -> _Found | None:
            found = attempt()
            if found is None:
                self.intake.check_refused(self.buffer.oldest_usable())
            return found

        try:
            return self.waits.wait_until(attempt_or_end, "rollouts", self._describe, progress=self.buffer.progress)
        except StalledError:
            self.buffer.check_stalled()
            raise

    def _attempt(self) -> TrainingBatch | None:
        if self._has_turn():
            return self.buffer.next_batch(_POLL_S)
        return None

    def _has_turn(self) -> bool:
        """Hand the GPU over while there is no batch, and take it, which may last, when there is one."""
        if self.turns is None:
            return True
        if not self.buffer.has_batch(0.0 if self.turns.is_ours else _POLL_S):
            self.turns.hand_over()
            return False
        self.turns.take(self.waits)
        return True

    def _describe(self) -> str:
        count = self.buffer.totals
        accepted = f"{count['accepted']} group{'s' * (count['accepted'] != 1)} accepted"
        return (
            f"{self.intake.describe()}; so far {accepted}, {count['no_signal']} without signal, {count['stale']} stale, "
            f"{count['dead_letters']} prompts given up"
        )


class RecordedRun:
    """The journal of a run that is over, or of one still running.

    Raises:
        JournalError: there is none, or it cannot be read.
    """

    def __init__(self, run_dir: Path) -> None:
        self._reader = JournalReader(run_dir / "journal.sqlite")
        self._facts = self._reader.facts()

    def close(self) -> None:
        self._reader.close()

    @property
    def num_threads(self) -> int:
        """CPU threads of torch in the recorded run; sums come out the same with as many only."""
        return int(json.loads(self._facts["num_threads"]))

    def check(self, facts: dict[str, str]) -> str:
        """Compare the facts of this run, and return the id of the recorded one.

        Raises:
            ConfigError: the configuration does not fit its groups.
            JournalError: its groups are those of a newer release.
        """
        check_same_batches(self._facts, facts, self._reader.path)
        return self._facts["run_id"]

    def newest_plan(self, step: int) -> MicroBatchPlan | None:
        return self._reader.newest_plan(step)

    def batches(self, from_step: int, shape: GroupShape) -> Iterator[TrainingBatch]:
        """The batches from optimizer step `from_step` (from 1) on, which may lie in the middle of the first.

        Raises:
            JournalError: one is missing, because old groups were deleted.
        """
        expected = from_step
        for step, last_step, lease_ids, num_fresh, _ in self._reader.batches(from_step):
            if step > expected:
                raise _missing(expected)
            if self._reader.num_deleted() and not self._is_whole(lease_ids):
                raise _missing(step)
            groups = [shape.load(frame) for frame in self._reader.frames(lease_ids)]
            yield TrainingBatch(step, last_step - expected + 1, last_step, groups, num_fresh)
            expected = last_step + 1
        if expected == from_step:
            raise _missing(expected)

    def _is_whole(self, lease_ids: Sequence[str]) -> bool:
        """Return whether a batch has its first group still: the oldest are deleted first."""
        row = self._reader.row(lease_ids[0])
        return row is not None and row.position == 0


@dataclass(eq=False)
class RecordedFeed:
    """A `Feed` of recorded batches; it ends the run after the last one."""

    recorded: RecordedRun
    shape: GroupShape
    check: Callable[[], None]
    first_step: int
    counts: Counter[str]
    sources: Sources = ONE
    wait_s: float = 0.0
    last: TrainingBatch | None = None

    def __iter__(self) -> Iterator[TrainingBatch]:
        for batch in self.recorded.batches(self.first_step + 1, self.shape):
            self.check()
            count_batch(self.counts, batch, self.sources)
            self.last = batch
            yield batch
        raise StopRequested


def _missing(step: int) -> JournalError:
    return JournalError(
        f"--from-journal: the groups of step {step} are not in the journal (any more). Runs that will be trained again "
        "need replay.keep_all: true"
    )
