"""The rollout buffer: ledger, batch cutter and journal behind one lock, shared by the two threads of the trainer.

Guarantee: the I/O thread leases and offers, the main thread cuts batches and publishes. Every group offered gets one
outcome, every prompt one fate, and the numbers of `counts` add up. What a method decides is in the journal before anybody
sees it: a group before its outcome is returned, the batch of a step before the step begins. On a full disk nothing is
decided and nothing is lost; the same call succeeds later. No method waits but for the disk, except `next_batch`, which
has a timeout.
"""

import contextlib
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from replay.batches.cutting import BatchCutter, CutBatch
from replay.batches.delivery import Arrival, Delivery
from replay.batches.signal_watch import SignalWatch
from replay.groups import GroupShape, RolloutGroup
from replay.journal import recovery
from replay.journal.writer import DeadLetter, Journal, JournalFullError
from replay.journal.writer import Outcome as Decision
from replay.prompts.failure_budgets import FailureWatch, failure_class
from replay.prompts.ledger import LeaseRecord, PromptLedger, UnknownLeaseError, parse_lease_id
from replay.prompts.rerolls import Judgement, Key, RerollRules

logger = logging.getLogger(__name__)

Outcome = Decision | Literal["duplicate", "unknown_lease"]
_REMEMBERED_ARRIVALS = 4096  # groups that the report of a step speaks of, the newest


class RolloutBuffer:
    """See the module's guarantee.

    Args:
        rules: who returns after a failure, and who rests after a success.
        mean_reward: of a group, for the journal to show; NaN if nothing is scored.
        max_failed_share: `next_batch` raises when more than this share of the last finished prompts are dead letters.
        max_groups_without_signal: `next_batch` raises after so many in a row, if there is no batch; None: never.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        cutter: BatchCutter,
        journal: Journal,
        *,
        rules: RerollRules,
        mean_reward: Callable[[RolloutGroup], float],
        max_failed_share: float,
        max_groups_without_signal: int | None = None,
    ) -> None:
        self._ledger = ledger
        self._cutter = cutter
        self._journal = journal
        self._rules = rules
        self._mean_reward = mean_reward
        self._failure_watch = FailureWatch(max_failed_share)
        self._signal_watch = SignalWatch(max_groups_without_signal)
        self._lease_budget = cutter.budget
        self._changed = threading.Condition()
        self._unburied: dict[str, tuple[str, str]] = {}  # leases that a full disk keeps from ending, reason and detail
        self._arrivals: deque[Arrival] = deque(maxlen=_REMEMBERED_ARRIVALS)  # since the last batch
        self._version = -1  # nothing is published yet
        self._newest_version = -1
        self.counts: Counter[str] = Counter()

    # The I/O thread's side.

    def lease(self, producer: str, *, now: float, timeout_s: float) -> LeaseRecord | None:
        """The next lease for `producer`, or None while the staleness budget is spent."""
        with self._changed:
            pending = self._ledger.num_leased + self._cutter.num_ready
            floor = self._lease_budget.floor(pending, self._cutter.next_step, self._cutter.least_places)
            if floor > self._version:
                return None
            record = self._ledger.lease(
                producer, version=self._version, policy_floor=floor, now=now, deadline=now + timeout_s
            )
            self.counts["leased"] += 1
            self.counts["rerolls_leased"] += record.item.reroll > 0
            return record

    def hand_over(self, lease_id: str, producer: str, *, deadline: float) -> bool:
        """Gives a lease, which nobody has, to `producer`. False if its prompt is answered by now, which ends the lease."""
        with self._changed:
            return self._ledger.hand_over(lease_id, producer, deadline=deadline)

    def adopt(
        self, producer: str, lease_ids: Sequence[str], *, deadline: float, of_this_run: bool = True
    ) -> dict[str, bool | None]:
        """Leases that `producer` holds from before a silence or another trainer process. For each: True if it may go
        on, False if it is not wanted, None if its group is in the journal already.

        Args:
            of_this_run: False if they may be another run's, unless this process gave them.
        """
        with self._changed:
            known = self._journal.known(lease_ids)
            result = dict.fromkeys(lease_ids, False) | dict.fromkeys(known)
            for name in [name for name in result if name not in known]:
                with contextlib.suppress(UnknownLeaseError):
                    result[name] = self._ledger.adopt(name, producer, deadline=deadline, of_this_run=of_this_run)
            self.counts["adopted"] += sum(bool(wanted) for wanted in result.values())
            return result

    def offer(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Decides what becomes of finished groups, durably, and returns the outcomes in the same order.

        Raises:
            JournalFullError: the disk is full; offer the same groups again later.
        """
        with self._changed:
            outcomes = self._judge(deliveries)
            fresh = [
                (delivery, outcome)
                for delivery, outcome in zip(deliveries, outcomes, strict=True)
                if outcome == "accepted" or outcome == "no_signal" or outcome == "stale"
            ]
            entries = [
                delivery.entry(outcome, self._mean_reward(delivery.group), self._rules.judge(delivery.group))
                for delivery, outcome in fresh
            ]
            if entries:
                self._journal.append(entries)
            for (delivery, outcome), entry in zip(fresh, entries, strict=True):
                self._admit(delivery.group, outcome, entry.judgement)
                if outcome != "stale":
                    reward = math.nan if entry.reward is None else entry.reward
                    self._signal_watch.note(delivery.group, reward, has_signal=outcome == "accepted")
            self.counts.update(outcomes)
            self._changed.notify_all()
            return outcomes

    def fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        """A lease came back without a group. Returns as `PromptLedger.fail`: goes out again, is given up, or is moot.

        Raises:
            JournalFullError: the prompt would become a dead letter, but the disk is full; the lease stays, and `expire` tries
                again.
        """
        with self._changed:
            return self._fail(lease_id, reason, detail, now)

    def give_back(self, lease_id: str) -> None:
        with self._changed:
            self._ledger.give_back(lease_id)
            self.counts["returned"] += 1

    def expire(self, now: float) -> list[LeaseRecord]:
        """Takes back every lease whose deadline has passed. What could not end on a full disk ends now if it can."""
        with self._changed:
            overdue = self._ledger.overdue(now)
            with contextlib.suppress(JournalFullError):
                for lease_id, (reason, detail) in list(self._unburied.items()):
                    self._fail(lease_id, reason, detail, now)
            return self._take_back(overdue, "expired", now)

    def release(self, producer: str, now: float, keep: frozenset[str] = frozenset()) -> list[LeaseRecord]:
        """Takes back the leases of a producer that left, except those it still holds."""
        with self._changed:
            lost = [record for record in self._ledger.leases_of(producer) if record.lease_id not in keep]
            return self._take_back(lost, "released", now)

    def leased_to(self, producer: str) -> set[str]:
        """The leases that `producer` has now."""
        with self._changed:
            return {record.lease_id for record in self._ledger.leases_of(producer)}

    @property
    def newest_version(self) -> int:
        """The newest policy that this run ever published, in this process or one before; -1 if none."""
        return max(self._version, self._newest_version)

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
            batch = self._try_cut(partial)
            if batch is None:
                self._changed.wait(timeout_s)
                batch = self._try_cut(partial)
            if batch is None:
                self._signal_watch.check()
            return batch

    def check_stalled(self) -> None:
        """No batch came for too long.

        Raises:
            NoSignalError: groups came, and none of this run ever had signal.
        """
        with self._changed:
            self._signal_watch.check_stalled(ever_had_signal=self.counts["accepted"] > 0)

    def lease_within(self, max_staleness: int) -> None:
        """From now on prompts are leased so that their groups come to be at most so many versions old. What is out
        already, and the bound on what is trained, stay as they are."""
        with self._changed:
            self._lease_budget = replace(self._lease_budget, max_staleness=max_staleness)

    def published(self, version: int) -> None:
        """From now on producers can generate with `version`."""
        with self._changed:
            self._version = version

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, beside the journal, for a run that trains every prompt that was not trained before."""
        with self._changed:
            return {
                "ledger": self._ledger.state(),
                "replay": self._cutter.state(),
                "counts": dict(self.counts),
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
                self.counts.clear()
                self.counts.update(state["counts"])
            found = recovery.recover(
                self._journal,
                step,
                state["journal_seq"] if state else 0,
                self._cutter.budget,
                partial=self._cutter.partial,
                comparable=comparable,
            )
            self._apply(found.fates)
            self._cutter.restore(
                found,
                step,
                lambda group_ids: [shape.load(frame) for frame in self._journal.frames(group_ids)],
                state["replay"] if state and comparable else [],
            )
            self._newest_version = self._journal.newest_version
            self.counts["quarantined"] += found.quarantined
            self.counts.update(found.counts)
            if found.batches or found.ready or found.quarantined:
                logger.info(
                    "journal: %d groups ready, %d steps to train again as they were cut, %d groups quarantined",
                    len(found.ready),
                    len(found.batches),
                    found.quarantined,
                )

    def depth(self) -> dict[str, int]:
        """How much is where, for messages and metrics."""
        with self._changed:
            return {
                "ready": self._cutter.num_ready,
                "replayable": self._cutter.num_replayable,
                "leased": self._ledger.num_leased,
                "deferred": self._ledger.num_deferred,
                "epoch": self._ledger.epoch,
            }

    # Both hold the lock.

    def _judge(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        answered = self._journal.known(delivery.group.group_id for delivery in deliveries)
        taken: set[Key] = set()
        outcomes: list[Outcome] = []
        for group, _, _, of_this_run in deliveries:
            try:
                key = self._ledger.find(group.group_id, of_this_run=of_this_run)
            except UnknownLeaseError:
                outcomes.append("unknown_lease")
                continue
            if group.group_id in answered or key is None or key in taken:
                outcomes.append("duplicate")
                continue
            answered.add(group.group_id)
            if group.policy_version < self._cutter.budget.oldest_usable(self._cutter.next_step):
                outcomes.append("stale")
                continue
            taken.add(key)
            outcomes.append("accepted" if self._cutter.signal(group) > 0.0 else "no_signal")
        return outcomes

    def _admit(self, group: RolloutGroup, outcome: Decision, judgement: Judgement) -> None:
        key = self._ledger.hold(group.group_id).key
        self._arrivals.append(Arrival.of(group, outcome))
        if outcome == "stale":
            self._ledger.requeue(key)
            return
        self._failure_watch.answered()
        numbers = (1, judgement.num_scored, judgement.num_successes)
        self.counts.update(dict(zip(recovery.attempt_counts(key[2]), numbers, strict=True)))
        if outcome == "no_signal":
            self._settle(key, judgement.verdict, group.policy_version)
        else:
            self._cutter.insert(group)

    def _settle(self, key: Key, verdict: str, policy_version: int) -> None:
        """The prompt has had its group, trained or not; it may come back, or rest."""
        self._ledger.settle(key)
        version = self._rules.return_version(key, verdict, policy_version)
        if version is not None:
            self.counts["deferred"] += self._ledger.defer(key, version)
        until_epoch = self._rules.rests_until(key, verdict)
        if until_epoch is not None:
            self.counts["rested"] += 1
            self._ledger.rest(key[1], until_epoch)

    def _take_back(self, records: Sequence[LeaseRecord], reason: str, now: float) -> list[LeaseRecord]:
        ended = []
        for record in records:
            try:
                self._fail(record.lease_id, reason, f"leased to {record.producer}", now)
            except JournalFullError:
                continue  # it stays a lease; `expire` tries again
            ended.append(record)
        return ended

    def _fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        spent = self._ledger.spent_by(lease_id, reason)
        if spent is not None:
            self._unburied.setdefault(lease_id, (reason, detail))
            self._journal.bury(DeadLetter(*spent.key, spent.attempt, failure_class(reason), reason, detail))
            self.counts["dead_letters"] += 1
            self._failure_watch.given_up(f"{reason}: {detail}")
            self._changed.notify_all()
        self._unburied.pop(lease_id, None)
        again = self._ledger.fail(lease_id, reason, now)
        self.counts[f"failed_{reason}"] += again is not None
        return again

    def _try_cut(self, partial: bool) -> CutBatch | None:
        self._failure_watch.check()
        try:
            for group in self._cutter.remove_stale():
                self._ledger.requeue(parse_lease_id(group.group_id)[0])
                self.counts["went_stale"] += 1
            batch = self._cutter.cut(
                num_generated=self.counts["accepted"] + self.counts["no_signal"],
                num_trained=self.counts["trained"] + self.counts["replayed"],
                partial=partial,
            )
        except JournalFullError:
            return None
        return None if batch is None else self._hand_over(batch)

    def _hand_over(self, batch: CutBatch) -> CutBatch:
        for group in batch.groups[: batch.num_fresh]:
            key, _ = parse_lease_id(group.group_id)
            if self._ledger.is_held(key):  # not of a batch that the checkpoint knows as begun
                self._settle(key, self._rules.judge(group).verdict, group.policy_version)
        self.counts["trained"] += batch.num_fresh
        self.counts["replayed"] += len(batch.groups) - batch.num_fresh
        batch = batch._replace(arrivals=list(self._arrivals))
        self._arrivals.clear()
        return batch

    def _apply(self, fates: Sequence[recovery.Fate]) -> None:
        for key, fate, verdict, policy_version, is_new in fates:
            # A reroll that went stale, and whose deferral is not known here, waits until that comes again.
            if not self._ledger.recall(key, is_new=is_new and fate != "again"):
                continue
            if fate == "again":
                self._ledger.requeue(key)
            elif fate == "settled":
                self._settle(key, verdict, policy_version)
