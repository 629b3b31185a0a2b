"""The rollout buffer: ledger, batch cutter and journal behind one lock, shared by the two threads of the trainer.

Guarantee: the I/O thread leases and offers, the main thread cuts batches and publishes. Every offered group gets one answer,
every prompt is settled once, and the numbers of `totals` add up. What a method decides is in the journal before anybody sees
it: a group before its producer is answered, the batch of a step before the step begins. On a full disk nothing is decided and
nothing is lost; the same call succeeds later. Methods wait for the disk alone, except `next_batch`, which has a timeout.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from replay.batches.cutting import CutBatch
from replay.batches.delivery import Delivery
from replay.groups import GroupShape
from replay.journal.recovery import recover
from replay.lease_ids import Key
from replay.lifecycle import Answer, Lifecycle
from replay.prompts.leases import LeaseRecord

logger = logging.getLogger(__name__)


class RolloutBuffer:
    """See the module's guarantee.

    Attributes:
        newest_version: the newest policy that this run ever published, in this process or one before; -1 if none.
        totals: of what has happened.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._ledger, self._cutter, self._journal = lifecycle.ledger, lifecycle.cutter, lifecycle.journal
        self.totals = lifecycle.totals
        self._lease_budget = self._cutter.budget
        self._changed = threading.Condition()
        self._version = self.newest_version = -1  # nothing is published yet

    # The I/O thread's side.

    def lease(self, producer: str, *, now: float, timeout_s: float) -> LeaseRecord[Key] | None:
        """The next lease for `producer`, or None while the staleness budget is spent."""
        with self._changed:
            pending = self._ledger.leases.num_leases + self._cutter.num_ready
            floor = self._lease_budget.floor(pending, self._cutter.next_step, self._cutter.least_fresh)
            if floor > self._version:
                return None
            record = self._ledger.lease(
                producer, version=self._version, policy_floor=floor, now=now, deadline=now + timeout_s
            )
            self.totals["leased"] += 1
            self.totals["rerolls_leased"] += record.work.key.reroll > 0
            return record

    def hand_over(self, lease_id: str, producer: str, *, deadline: float) -> bool:
        """Gives a lease, which nobody has, to `producer`. False if its prompt is answered by now, which ends the lease."""
        with self._changed:
            return self._ledger.leases.hand_over(lease_id, producer, deadline)

    def adopt(
        self, producer: str, lease_ids: Sequence[str], *, deadline: float, of_this_run: bool = True
    ) -> dict[str, bool | None]:
        """Of what `producer` holds from before a silence or another trainer process; returns as `Lifecycle.adopt`."""
        with self._changed:
            return self._lifecycle.adopt(producer, lease_ids, deadline=deadline, of_this_run=of_this_run)

    def offer(self, deliveries: Sequence[Delivery]) -> list[Answer]:
        """Decides what becomes of finished groups, durably; returns and raises as `Lifecycle.offer`."""
        with self._changed:
            answers = self._lifecycle.offer(deliveries)
            self._changed.notify_all()
            return answers

    def fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        """A lease came back without a group: the prompt waits again (True), is given up (False), or neither (None).

        Raises:
            JournalFullError: the prompt would be given up, but the disk is full; the lease stays, and `expire` tries again.
        """
        with self._changed:
            return self._lifecycle.fail(lease_id, reason, detail, now)

    def give_back(self, lease_id: str) -> None:
        with self._changed:
            self._ledger.leases.give_back(lease_id)
            self.totals["returned"] += 1

    def expire(self, now: float) -> list[LeaseRecord[Key]]:
        """As `Lifecycle.expire`."""
        with self._changed:
            return self._lifecycle.expire(now)

    def release(self, producer: str, now: float, keep: frozenset[str] = frozenset()) -> list[LeaseRecord[Key]]:
        """Takes back the leases of a producer that left, except those it still holds."""
        with self._changed:
            lost = [record for record in self._ledger.leases.leases_of(producer) if record.lease_id not in keep]
            return self._lifecycle.take_back(lost, "released", now)

    def leased_to(self, producer: str) -> set[str]:
        """The leases that `producer` has now."""
        with self._changed:
            return {record.lease_id for record in self._ledger.leases.leases_of(producer)}

    # The main thread's side.

    def next_batch(self, timeout_s: float, *, partial: bool = False) -> CutBatch | None:
        """Cuts the batch of the next step: `groups_per_step` groups with signal, none too stale. None if there is none
        within the timeout (or a little earlier, when something arrived that did not complete one), or no room on the
        disk to note it.

        Args:
            partial: take fewer groups rather than wait.

        Raises:
            DataFailuresError: too many of the last prompts were given up.
            NoSignalError: too many groups in a row had no signal.
        """
        with self._changed:
            batch = self._lifecycle.cut(partial=partial)
            if batch is None:
                self._changed.wait(timeout_s)
                batch = self._lifecycle.cut(partial=partial)
            if batch is None:
                self._lifecycle.signals.check()
            return batch

    def check_stalled(self) -> None:
        """No batch came for too long; raises as `SignalWatch.check_stalled`."""
        with self._changed:
            self._lifecycle.signals.check_stalled(ever_had_signal=self.totals["accepted"] > 0)

    def lease_within(self, max_staleness: int) -> None:
        """From now on prompts are leased so that their groups come to be at most so many versions old. What is out
        already, and the bound on what is trained, stay as they are."""
        with self._changed:
            self._lease_budget = replace(self._lease_budget, max_staleness=max_staleness)

    def published(self, version: int) -> None:
        """From now on producers can generate with `version`."""
        with self._changed:
            self._version = version
            self.newest_version = max(self.newest_version, version)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, beside the journal, for a run that trains every prompt that was not trained before."""
        with self._changed:
            return {
                "ledger": self._ledger.state(),
                "replay": self._cutter.state(),
                "counts": dict(self.totals),
                "journal_seq": self._journal.last_seq,
            }

    def restore(self, state: dict[str, Any] | None, *, step: int, shape: GroupShape, comparable: bool = True) -> None:
        """Goes on from a checkpoint (None: from the beginning) and from what the journal holds beyond it.

        Args:
            step: optimizer steps taken.
            shape: of the groups to load.
            comparable: False if the journal's groups were made under settings that do not fit any more.

        Raises:
            DatasetError: the dataset has another size than at the checkpoint.
        """
        with self._changed:
            if state is not None:
                self._ledger.restore(state["ledger"])
                self.totals.clear()
                self.totals.update(state["counts"])
            since_seq, cutter = state["journal_seq"] if state else 0, self._cutter
            found = recover(
                self._journal, step, since_seq, cutter.budget, partial=cutter.partial, comparable=comparable
            )
            self._lifecycle.apply(found.prompts)
            self._cutter.restore(
                found,
                step,
                lambda group_ids: [shape.load(frame) for frame in self._journal.frames(group_ids)],
                state["replay"] if state and comparable else [],
            )
            self.newest_version = self._journal.newest_version
            self.totals["quarantined"] += found.quarantined
            self.totals.update(found.counts)
            if found.batches or found.ready or found.quarantined:
                numbers = (len(found.ready), len(found.batches), found.quarantined)
                text = "journal: %d groups ready, %d steps to train again as they were cut, %d groups quarantined"
                logger.info(text, *numbers)

    def depth(self) -> dict[str, int]:
        """How much is where, for messages and metrics."""
        with self._changed:
            return {
                "ready": self._cutter.num_ready,
                "replayable": self._cutter.num_replayable,
                "leased": self._ledger.leases.num_leases,
                "deferred": self._ledger.num_deferred,
                "epoch": self._ledger.order.epoch,
            }
