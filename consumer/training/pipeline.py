"""What a training loop needs from the rest of the trainer, and the pipeline of a live run.

Guarantee: the journal knows that a step ended, and which policy it made, before any producer hears of that policy, which
is published while training goes on; what no checkpoint needs any more leaves the journal only after the newer checkpoint is
on the disk.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from consumer.checkpoints import folders as checkpoints
from consumer.evaluation.control import EvaluationControl
from consumer.intake.intake import Intake
from consumer.publishing.publisher import Publisher
from consumer.publishing.snapshots import Snapshot
from consumer.waiting import Patience
from protocol.config.learning import ReplaySection
from protocol.files.space import out_of_space
from protocol.wire.messages import PolicyInfo
from replay.batches.cutting import CutBatch
from replay.buffer import RolloutBuffer
from replay.journal.database import JournalFullError
from replay.journal.disk import DiskGuard
from replay.journal.retention import Retention
from replay.journal.writer import Journal
from replay.prompts.adaptive_staleness import StalenessController

logger = logging.getLogger(__name__)

_PAUSE_S = 0.25


class Feed(Protocol):
    """Where batches come from."""

    wait_s: float  # spent on the last batch
    last: CutBatch | None

    def __iter__(self) -> Iterator[CutBatch]: ...


class Pipeline(Protocol):
    """Where a step's results go."""

    def publish(self, step: int, version: int, snapshot: Snapshot) -> None:
        """Step `step` ended and made this policy. Releases the snapshot, then or later."""
        ...

    def flush(self) -> None:
        """Returns when every policy is published."""
        ...

    def end_step(self, step: int) -> None:
        """Step `step` ended and made no policy."""
        ...

    def observe(self, effective_share: float | None, wait_share: float) -> dict[str, float]:
        """Takes note of how a step went, and returns how the pipeline stands.

        Args:
            effective_share: Kish's effective sample share of its tokens, if known.
            wait_share: share of its time that the trainer waited for rollouts.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What belongs into a checkpoint of this moment, as plain data."""
        ...

    def checkpointed(self, checkpoints_dir: Path) -> None:
        """A checkpoint was committed, and old ones were deleted."""
        ...


class LivePipeline:
    """A `Pipeline` with producers, a buffer and a journal.

    Args:
        staleness: adapts the staleness that leases are given within; None leaves it as configured.
        evaluation: is told of every policy before it is published.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        journal: Journal,
        intake: Intake,
        patience: Patience,
        disk: DiskGuard,
        settings: ReplaySection,
        staleness: StalenessController | None = None,
        evaluation: EvaluationControl | None = None,
    ) -> None:
        self._buffer = buffer
        self._journal = journal
        self._intake = intake
        self._patience = patience
        self._disk = disk
        self._settings = settings
        self._staleness = staleness
        self._evaluation = evaluation
        self._retention = Retention(journal)
        self._publisher = Publisher(self._announce, patience, intake.describe)
        if staleness is not None:
            buffer.lease_within(staleness.staleness)

    def publish(self, step: int, version: int, snapshot: Snapshot) -> None:
        self.end_step(step)
        self._publisher.submit(version, step, snapshot)

    def flush(self) -> None:
        self._publisher.flush()

    def check(self) -> None:
        """Raises what ended the publishing, if anything did."""
        self._publisher.check()

    def close(self) -> None:
        self._publisher.close()

    def end_step(self, step: int) -> None:
        def attempt() -> bool | None:
            try:
                self._journal.end_step(step)
            except JournalFullError:
                self._disk.spend_reserve()
                return None
            return True

        self._patience.until(attempt, "room on the disk of run_dir", self._intake.describe, pause_s=_PAUSE_S)

    def observe(self, effective_share: float | None, wait_share: float) -> dict[str, float]:
        depth = {f"pipeline/{name}": float(count) for name, count in self._buffer.depth().items()}
        if self._staleness is None:
            return depth
        decision = self._staleness.note(effective_share=effective_share, wait_share=wait_share)
        if decision is not None:
            logger.info("max_staleness: %s", decision.reason)
            self._buffer.lease_within(decision.new)
        return depth | {"pipeline/max_staleness": float(self._staleness.staleness)}

    def state(self) -> dict[str, Any]:
        state = self._buffer.state()
        return state if self._staleness is None else state | {"staleness": self._staleness.state()}

    def checkpointed(self, checkpoints_dir: Path) -> None:
        kept = checkpoints.committed(checkpoints_dir)
        if not kept or self._settings.keep_all:
            return
        states = [checkpoint.state for checkpoint in kept] + [self._buffer.state()]
        try:
            self._retention.prune(
                oldest_step=kept[0].step,
                oldest_seq=kept[0].state["journal_seq"],
                replayable={group_id for state in states for group_id, *_ in state["replay"]},
                keep_bytes=self._settings.keep_bytes if self._disk.has_room else 0,
                keep_age_s=self._settings.keep_age_s,
            )
        except JournalFullError:
            self._disk.spend_reserve()  # the next checkpoint tries again

    def _announce(self, version: int, step: int, snapshot: Snapshot) -> bool:
        """On the publisher's thread."""
        digest = snapshot.digest()
        try:
            self._journal.note_policy(version, step, digest)
            if self._evaluation is not None:
                policy = PolicyInfo(version, digest, len(snapshot.data))
                self._evaluation.submit(policy, step, snapshot.data, snapshot.probe)
        except (JournalFullError, OSError) as error:
            if not isinstance(error, JournalFullError) and not out_of_space(error, self._journal.path.parent):
                raise
            self._disk.spend_reserve()
            return False
        self._intake.publish(version, snapshot.data, digest, snapshot.probe, snapshot.release)
        return True
