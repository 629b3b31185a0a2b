"""Training again, from a run's journal and without producers.

Guarantee: the batches of the surviving lineage, in the recorded order and nothing else. With the same configuration, on
the same kind of CPU and in float32, every checkpoint comes out bit for bit as in the recorded run.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from consumer.checkpoints.run_facts import check_same_batches
from consumer.publishing.published_policy import Snapshot
from consumer.waiting import StopRequested
from protocol.errors import JournalError
from replay.batches.cutting import CutBatch
from replay.groups import GroupShape
from replay.journal.reader import JournalReader


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
        """Returns the id of the recorded run.

        Raises:
            ConfigError: the configuration does not fit its groups.
            JournalError: its groups are those of a newer release.
        """
        check_same_batches(self._facts, facts, self._reader.path)
        return self._facts["run_id"]

    def batches(self, from_step: int, shape: GroupShape) -> Iterator[CutBatch]:
        """The batches from optimizer step `from_step` (from 1) on, which may lie in the middle of the first.

        Raises:
            JournalError: one is missing, because old groups were deleted.
        """
        expected = from_step
        for step, last_step, group_ids, num_fresh in self._reader.batches(from_step):
            if step > expected:
                raise _missing(expected)
            if len(group_ids) < int(self._facts["groups_per_step"]) and self._reader.num_deleted():
                raise _missing(step)  # or a partial batch; where groups were deleted nobody can tell
            groups = [shape.load(frame) for frame in self._reader.frames(group_ids)]
            yield CutBatch(step - 1, last_step - expected + 1, last_step, groups, num_fresh)
            expected = last_step + 1
        if expected == from_step:
            raise _missing(expected)


class RecordedFeed:
    """A `Feed` of recorded batches; it ends the run after the last one."""

    def __init__(
        self,
        recorded: RecordedRun,
        shape: GroupShape,
        check: Callable[[], None],
        first_step: int,
        counts: Counter[str],
    ) -> None:
        self._recorded = recorded
        self._shape = shape
        self._check = check
        self._first_step = first_step
        self._counts = counts
        self.wait_s = 0.0
        self.last: CutBatch | None = None

    def __iter__(self) -> Iterator[CutBatch]:
        for batch in self._recorded.batches(self._first_step + 1, self._shape):
            self._check()
            self._counts["trained"] += batch.num_fresh
            self._counts["replayed"] += len(batch.groups) - batch.num_fresh
            self.last = batch
            yield batch
        raise StopRequested


class RetrainingPipeline:
    """A `Pipeline` that leads nowhere."""

    def publish(self, step: int, version: int, snapshot: Snapshot) -> None:
        snapshot.release()

    def flush(self) -> None: ...

    def end_step(self, step: int) -> None: ...

    def observe(self, effective_share: float | None, wait_share: float) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def checkpointed(self, checkpoints_dir: Path) -> None: ...


def _missing(step: int) -> JournalError:
    return JournalError(
        f"--from-journal: the groups of step {step} are not in the journal (any more). Runs that will be trained again "
        "need replay.keep_all: true"
    )
