"""The rollout buffer: ledger, batch cutter and journal behind one lock, shared by the two threads of the trainer.

Guarantee: the I/O thread leases and offers, the main thread cuts batches and publishes. Every offered group gets one answer,
every prompt is settled once, and the numbers of `totals` add up. What a method decides is in the journal before anybody sees
it: a group before its producer is answered, the batch of a step before the step begins. On a full disk nothing is decided and
nothing is lost; the same call succeeds later. Methods wait for the disk alone, except `next_batch`, which has a timeout.
"""

import logging
from dataclasses import dataclass
from typing import Any

from replay.batches.cutting import CutBatch
from replay.groups import GroupShape
from replay.journal.recovery import recover
from replay.lease_ids import Key
from replay.lifecycle import Lifecycle, locked
from replay.prompts.leases import LeaseRecord

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RolloutBuffer(Lifecycle):
    """See the module's guarantee.

    Attributes:
        newest_version: the newest policy that this run ever published, in this process or one before; -1 if none.
    """

    newest_version: int = -1
    _version: int = -1  # nothing is published yet

    # The I/O thread's side.

    @locked
    def lease(self, producer: str, *, now: float, timeout_s: float) -> LeaseRecord[Key] | None:
        """The next lease for `producer`, or None while the staleness budget is spent."""
        pending = self.ledger.leases.num_leases + self.cutter.num_ready
        floor = self.cutter.budget.floor(pending, self.cutter.next_step, self.cutter.least_fresh)
        if floor > self._version:
            return None
        record = self.ledger.lease(
            producer, version=self._version, policy_floor=floor, now=now, deadline=now + timeout_s
        )
        self.totals["leased"] += 1
        self.totals["rerolls_leased"] += record.work.key.reroll > 0
        return record

    @locked
    def hand_over(self, lease_id: str, producer: str, *, deadline: float) -> bool:
        """Gives a lease, which nobody has, to `producer`. False if its prompt is answered by now, which ends the lease."""
        return self.ledger.leases.hand_over(lease_id, producer, deadline)

    @locked
    def give_back(self, lease_id: str) -> None:
        self.ledger.leases.give_back(lease_id)
        self.totals["returned"] += 1

    @locked
    def release(self, producer: str, now: float, keep: frozenset[str] = frozenset()) -> list[LeaseRecord[Key]]:
        """Takes back the leases of a producer that left, except those it still holds."""
        lost = [record for record in self.ledger.leases.leases_of(producer) if record.lease_id not in keep]
        return self.take_back(lost, "released", now)

    @locked
    def leased_to(self, producer: str) -> set[str]:
        """The leases that `producer` has now."""
        return {record.lease_id for record in self.ledger.leases.leases_of(producer)}

    # The main thread's side.

    @locked
    def next_batch(self, timeout_s: float, *, partial: bool = False) -> CutBatch | None:
        """Cuts the batch of the next step: `groups_per_step` groups with signal, or fewer with `partial`, none too stale. None
        if there is none within the timeout (or a little earlier, when something arrived that did not complete one), or no room
        on the disk.

        Raises:
            DataFailuresError: too many of the last prompts were given up.
            NoSignalError: too many groups in a row had no signal.
        """
        batch = self.cut(partial=partial)
        if batch is None:
            self.changed.wait(timeout_s)
            batch = self.cut(partial=partial)
        if batch is None:
            self.signals.check()
        return batch

    @locked
    def has_batch(self, timeout_s: float, *, partial: bool = False) -> bool:
        """Whether `next_batch` would find one within the timeout (or a little earlier, as there). Raises as that."""
        found = self.can_cut(partial=partial)
        if not found:
            self.changed.wait(timeout_s)
            found = self.can_cut(partial=partial)
        if not found:
            self.signals.check()
        return found

    @locked
    def progress(self) -> int:
        """The number of groups that brought a batch nearer. One without signal counts where `guards.max_groups_without_signal`
        bounds how many may come."""
        return self.totals["accepted"] + self.signals.is_bounded * self.totals["no_signal"]

    @locked
    def check_stalled(self) -> None:
        """No batch came for too long; raises as `SignalWatch.check_stalled`."""
        self.signals.check_stalled(ever_had_signal=self.totals["accepted"] > 0)

    @locked
    def published(self, version: int) -> None:
        """From now on producers can generate with `version`."""
        self._version = version
        self.newest_version = max(self.newest_version, version)

    @locked
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, beside the journal, for a run that trains every prompt that was not trained before."""
        return {
            "ledger": self.ledger.state(),
            "replay": self.cutter.state(),
            "counts": dict(self.totals),
            "journal_seq": self.journal.last_seq,
        }

    @locked
    def restore(self, state: dict[str, Any] | None, *, step: int, shape: GroupShape, comparable: bool = True) -> None:
        """Goes on from a checkpoint (None: from the beginning) after `step` steps, and from what the journal holds beyond it,
        if that is `comparable`: made under settings that still fit. Raises DatasetError if the dataset has another size than
        at the checkpoint."""
        if state is not None:
            self.ledger.restore(state["ledger"])
            self.totals.clear()
            self.totals.update(state["counts"])
        since_seq, cutter = state["journal_seq"] if state else 0, self.cutter
        found = recover(self.journal, step, since_seq, cutter.budget, partial=cutter.partial, comparable=comparable)
        self.apply(found.prompts)
        self.cutter.restore(
            found,
            step,
            lambda group_ids: [shape.load(frame) for frame in self.journal.frames(group_ids)],
            state["replay"] if state and comparable else [],
        )
        self.newest_version = self.journal.newest_version
        self.totals["quarantined"] += found.quarantined
        self.totals.update(found.counts)
        if found.batches or found.ready or found.quarantined:
            numbers = (len(found.ready), len(found.batches), found.quarantined)
            text = "journal: %d groups ready, %d steps to train again as they were cut, %d groups quarantined"
            logger.info(text, *numbers)

    @locked
    def depth(self) -> dict[str, int]:
        """How much is where, for messages and metrics."""
        return {
            "ready": self.cutter.num_ready,
            "replayable": self.cutter.num_replayable,
            "leased": self.ledger.leases.num_leases,
            "deferred": self.ledger.num_deferred,
            "epoch": self.ledger.order.epoch,
        }
