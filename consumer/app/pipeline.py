"""What a training loop needs from the rest of the trainer, the pipeline of a live run, and its checkpoints.

Guarantee: the journal knows that a step ended, and which policy it made, before any producer hears of that policy, which
is published while training goes on. A checkpoint is committed only together with the pipeline state that belongs to it, as soon
as the disk has room for both; older ones go after that, and what no checkpoint needs any more leaves the journal last.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consumer.evaluate.control import EvaluationControl
from consumer.learn import checkpoints as checkpoints
from consumer.learn.micro_batches import Recorded
from consumer.link.commit_queue import RolloutStorage
from consumer.link.intake import Intake
from consumer.link.policy_store import PublishedPolicy, Snapshot
from consumer.link.publisher import Publisher
from consumer.report.steps import StepReport
from consumer.waiting import ThreadErrors, WaitPolicy, write_when_there_is_room
from protocol.config.learning import ReplaySection
from protocol.runtime.files import out_of_space
from replay.batch_selection import TrainingBatch
from replay.journal.retention import Retention
from replay.journal.schema import MicroBatchPlan
from replay.journal.writer import JournalFullError

logger = logging.getLogger(__name__)

_PAUSE_S = 0.25


class Feed(Protocol):
    """Where batches come from."""

    wait_s: float  # spent on the last batch
    last: TrainingBatch | None

    def __iter__(self) -> Iterator[TrainingBatch]: ...


class SharedDevice(Protocol):
    """A device that the trainer has for the time of its steps only."""

    def await_turn(self) -> None:
        """Is called before the first step, and returns when the device is the trainer's."""

    def leave(self) -> None:
        """Is called after the last step: from now on the device is for others."""


class Pipeline:
    """Where a step's results go. This one leads nowhere, as a run that is trained again needs it.

    Args:
        recorded: as `newest_plan`.
    """

    def __init__(self, recorded: Recorded = lambda step: None) -> None:
        self._recorded = recorded

    def publish(self, step: int, version: int, snapshot: Snapshot) -> None:
        """Publish the policy that step `step` has made. The snapshot is released, then or later."""
        snapshot.release()

    def flush(self) -> None:
        """Returns when every policy is published."""

    def end_step(self, step: int, plan: MicroBatchPlan) -> None:
        """Record that step `step` ended, and how it was split into passes."""

    def undo_try(self, last_step: int) -> None:
        """Do not count this try of the batch that ends with step `last_step`: it is not why the trainer stops. Any thread may
        call it, and again and again."""

    def newest_plan(self, step: int) -> MicroBatchPlan | None:
        """How step `step`, or the newest one before it that is known, was cut before."""
        return self._recorded(step)

    def observe(self) -> dict[str, float]:
        """Return how many groups and prompts are where after a step, by metric."""
        return {}

    def state(self) -> dict[str, Any]:
        """What belongs into a checkpoint of this moment, as plain data."""
        return {}

    def checkpointed(self, checkpoints_dir: Path) -> None:
        """A checkpoint was committed, and old ones were deleted."""


@dataclass(frozen=True)
class Connections:
    """What a training loop is connected to.

    Args:
        evaluation: None: nothing is evaluated in this run.
        shared: None: the device is the trainer's alone.
    """

    feed: Feed
    pipeline: Pipeline
    report: StepReport
    waits: WaitPolicy
    evaluation: EvaluationControl | None = None
    shared: SharedDevice | None = None


@dataclass(eq=False)
class LivePipeline(Pipeline):
    """With producers, a buffer and a journal.

    Args:
        errors: is told what ended the thread that publishes.
        evaluation: is told of every policy before it is published.
    """

    storage: RolloutStorage
    intake: Intake
    waits: WaitPolicy
    errors: ThreadErrors
    settings: ReplaySection
    evaluation: EvaluationControl | None = None

    def __post_init__(self) -> None:
        self._buffer, self._journal, self._disk = self.storage
        self._undoing, self._undone = threading.Lock(), -1  # the last step of the batch whose try does not count
        self._retention = Retention(self._journal)
        self._publisher = Publisher(self._announce, self.waits, self.intake.describe, self.errors)

    def publish(self, step: int, version: int, snapshot: Snapshot) -> None:
        self._publisher.submit(step, version, snapshot)

    def flush(self) -> None:
        self._publisher.flush()

    def close(self) -> None:
        self._publisher.close()

    def undo_try(self, last_step: int) -> None:
        with self._undoing, contextlib.suppress(JournalFullError):
            if last_step != self._undone:
                self._journal.undo_try(last_step)
                self._undone = last_step

    def newest_plan(self, step: int) -> MicroBatchPlan | None:
        return self._journal.newest_plan(step)

    def end_step(self, step: int, plan: MicroBatchPlan) -> None:
        def attempt() -> bool | None:
            try:
                self._journal.end_step(step, plan)
            except JournalFullError:
                self._disk.spend_reserve()
                return None
            return True

        self.waits.wait_until(attempt, "room on the disk of run_dir", self.intake.describe, pause_s=_PAUSE_S)

    def observe(self) -> dict[str, float]:
        return {f"pipeline/{name}": float(count) for name, count in self._buffer.depth().items()}

    def state(self) -> dict[str, Any]:
        return self._buffer.state()

    def checkpointed(self, checkpoints_dir: Path) -> None:
        kept = checkpoints.committed(checkpoints_dir)
        if not kept or self.settings.keep_all:
            return
        states = [checkpoint.state for checkpoint in kept] + [self._buffer.state()]
        try:
            self._retention.prune(
                oldest_step=kept[0].step,
                oldest_seq=kept[0].state["journal_seq"],
                replayable={lease_id for state in states for lease_id, *_ in state["replay"]},
                keep_bytes=self.settings.keep_bytes if self._disk.has_room else 0,
                keep_age_s=self.settings.keep_age_s,
            )
        except JournalFullError:
            self._disk.spend_reserve()  # the next checkpoint tries again

    def _announce(self, step: int, policy: PublishedPolicy) -> bool:
        """On the publisher's thread."""
        try:
            self._journal.note_policy(policy.version, step, policy.digest)
            if self.evaluation is not None:
                self.evaluation.submit(policy, step)
        except (JournalFullError, OSError) as error:
            if not isinstance(error, JournalFullError) and not out_of_space(error, self._journal.path.parent):
                raise
            self._disk.spend_reserve()
            return False
        self.intake.publish(policy)
        return True


@dataclass(eq=False)
class CheckpointWriter:
    """See the module's guarantee.

    Args:
        folder: of all checkpoints.
        keep: this many of the newest; None: all.
    """

    folder: Path
    pipeline: Pipeline
    waits: WaitPolicy
    run_id: str
    keep: int | None

    def commit(self, step: int, staged: Path, write: Callable[[], None]) -> None:
        """Commits a checkpoint of this moment, after optimizer step `step`.

        Args:
            write: puts the part that transformers writes into `staged`.
        """
        state = self.pipeline.state() | {"step": step, "run_id": self.run_id}

        def whole() -> None:
            checkpoints.clear_leftovers(self.folder)
            try:
                write()
                checkpoints.commit(staged, state)
            except BaseException:
                checkpoints.clear_leftovers(self.folder)
                raise

        write_when_there_is_room(whole, self.waits, self.folder, "a checkpoint")
        if self.keep:
            checkpoints.prune(self.folder, self.keep)
        self.pipeline.checkpointed(self.folder)
