"""A run of the trainer with producers: buffer, journal, intake, the thread that publishes.

Guarantee: the journal knows that a step ended, and which policy it made, before any producer hears of that policy, which
is published while training goes on. What no checkpoint needs any more leaves the journal after the checkpoint, last of all.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from consumer.app.feed import BatchFeed
from consumer.app.run import Liveness, Run
from consumer.learn import checkpoints
from consumer.link.commit_queue import RolloutStorage
from consumer.link.device_moves import DeviceMoves
from consumer.link.gpu_turns import GpuTurns
from consumer.link.intake import Intake
from consumer.link.policy_store import PublishedPolicy, Snapshot
from consumer.link.publisher import Publisher
from protocol.errors import RankLostError
from protocol.runtime.files import out_of_space
from protocol.wire.messages import Heartbeat
from replay.journal.retention import Retention
from replay.journal.schema import MicroBatchPlan
from replay.journal.writer import JournalFullError

_PAUSE_S = 0.25
_FINAL_S = 60.0  # for producers to take the last version


@dataclass(eq=False)
class LiveRun(Run):
    """A run with producers. Close it in the end.

    Args:
        turns: on the GPU; None: it is the trainer's alone.
        refusals: connections that the sockets refused, by reason.
    """

    feed: BatchFeed
    storage: RolloutStorage
    intake: Intake
    heartbeat: Liveness
    turns: GpuTurns | None = None
    refusals: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._buffer, self._journal, self._disk = self.storage
        self._undoing, self._undone = threading.Lock(), -1  # the last step of the batch whose try does not count
        self._retention = Retention(self._journal)
        self._publisher = Publisher(self._announce, self.waits, self.intake.describe, self.heartbeat.errors)

    def submit(self, step: int, version: int, snapshot: Snapshot) -> None:
        self._publisher.submit(step, version, snapshot)

    def flush(self) -> None:
        self._publisher.flush()

    def await_final(self) -> None:
        """Wait, at most `_FINAL_S`, until every producer that does not refuse it serves the newest version."""
        self.flush()
        fleet, until = self.intake.fleet, time.monotonic() + _FINAL_S
        version = fleet.store.newest.version

        def is_behind(heartbeat: Heartbeat) -> bool:
            return heartbeat.policy_version < version and heartbeat.num_refused == 0

        while any(is_behind(session.heartbeat) for session in list(fleet.sessions.values())):
            if self.setup.stop() or time.monotonic() > until:
                return
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        self._publisher.close()

    def undo_try(self) -> None:
        batch = self.feed.last
        with self._undoing, contextlib.suppress(JournalFullError):
            if batch is not None and batch.last_step != self._undone:
                self._journal.undo_try(batch.last_step)
                self._undone = batch.last_step

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

    def checkpointed(self) -> None:
        settings = self.setup.config.replay
        kept = checkpoints.committed(self.setup.config.checkpoints_dir)
        if not kept or settings.keep_all:
            return
        states = [checkpoint.state for checkpoint in kept] + [self._buffer.state()]
        try:
            self._retention.prune(
                oldest_step=kept[0].step,
                oldest_seq=kept[0].state["journal_seq"],
                replayable={lease_id for state in states for lease_id, *_ in state["replay"]},
                keep_bytes=settings.keep_bytes if self._disk.has_room else 0,
                keep_age_s=settings.keep_age_s,
            )
        except JournalFullError:
            self._disk.spend_reserve()  # the next checkpoint tries again

    def _announce(self, step: int, policy: PublishedPolicy) -> bool:
        """Record a policy and announce it; the publisher's thread calls this. False: no room on the disk."""
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

    def describe(self) -> str:
        return self.intake.describe()

    def await_device(self) -> None:
        self.feed.await_turn()

    def leave_device(self) -> None:
        self.feed.leave()

    def enable_turns(self) -> None:
        """Move the model between GPU and host memory at each turn, where the GPU is shared."""
        if self.turns is not None:
            trainer = self.trainer
            moves = DeviceMoves(trainer.accelerator.device, trainer.kept_tensors, trainer.forget_batch)
            self.turns.carry(moves, self.flush, self.intake.wake)

    def lose_rank(self, error: RankLostError) -> None:
        """Note that a rank was lost, which is not the fault of the batch in progress. Any thread may call it."""
        self.heartbeat.errors.note(error)
        self.undo_try()

    def beat(self) -> None:
        """Note that the intake's thread came round. Once a stop is requested the batch in progress is not to blame for an end of
        the process, because a second signal, or a supervisor that waits no longer, may cut its step short."""
        self.heartbeat.health.beat("intake")
        if self.heartbeat.stop_requested():
            self.undo_try()

    def is_stop_noted(self) -> bool:
        """Return whether the try of the batch in progress was taken back. A handler of signals may call it."""
        batch = self.feed.last
        return batch is None or batch.last_step == self._undone
