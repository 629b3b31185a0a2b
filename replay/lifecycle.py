"""What becomes of groups, from their arrival to the batch that trains them, and of their prompts.

Guarantee: every offered group gets one answer. A group is in the journal before anything else knows of it, and so is the dead
letter of a prompt that is given up. A lease that would give its prompt up stays while the disk is full, and ends later for the
reason that it had first.
"""

import contextlib
import functools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, Literal, ParamSpec, TypeVar

from replay.batches.cutting import BatchCutter, CutBatch
from replay.batches.delivery import Arrival, Delivery
from replay.batches.signal_watch import SignalWatch
from replay.groups import RolloutGroup
from replay.journal.database import JournalFullError
from replay.journal.recovery import RecoveredPrompt, attempt_counts
from replay.journal.tables import DeadLetter, Entry, Outcome
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId, UnknownLeaseError
from replay.prompts.failure_budgets import FailureWatch, failure_class
from replay.prompts.leases import Held, LeaseRecord, Work
from replay.prompts.ledger import PromptLedger
from replay.prompts.rerolls import RerollRules

Answer = Outcome | Literal["duplicate", "unknown_lease"]
_Self = TypeVar("_Self", bound="Lifecycle")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_REMEMBERED_ARRIVALS = 4096  # groups that the report of a step speaks of, the newest


def locked(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Makes of a method one that holds the lock, so that any thread may call it."""

    @functools.wraps(method)
    def call(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self.changed:
            return method(self, *args, **kwargs)

    return call


@dataclass(eq=False)
class Lifecycle:
    """See the module's guarantee. The rollout buffer is one.

    Attributes:
        changed: the lock; is notified when groups were offered.
    """

    ledger: PromptLedger
    cutter: BatchCutter
    journal: Journal
    rules: RerollRules
    mean_reward: Callable[[RolloutGroup], float]  # for the journal to show; NaN if nothing is scored
    failures: FailureWatch
    signals: SignalWatch
    totals: Counter[str] = field(default_factory=Counter)  # of what has happened
    changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    # Since the last batch:
    _arrivals: deque[Arrival] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_ARRIVALS))
    # The reason and detail of leases that a full disk keeps from ending:
    _unburied: dict[str, tuple[str, str]] = field(default_factory=dict)

    # Groups

    @locked
    def offer(self, deliveries: Sequence[Delivery]) -> list[Answer]:
        """Decides what becomes of finished groups, durably; returns the answers, in their order. With JournalFullError nothing
        was decided."""
        answered = self.journal.known(delivery.group.group_id for delivery in deliveries)
        taken: set[Key] = set()
        answers: list[Answer] = []
        graded: list[tuple[RolloutGroup, Entry]] = []
        for delivery in deliveries:
            group = delivery.group
            try:
                key = self.ledger.find(group.lease, of_this_run=delivery.of_this_run)
            except UnknownLeaseError:
                answers.append("unknown_lease")
                continue
            if group.group_id in answered or key is None or key in taken:
                answers.append("duplicate")
                continue
            answered.add(group.group_id)
            entry = self._entry(delivery)
            if entry.outcome != "stale":
                taken.add(key)
            answers.append(entry.outcome)
            graded.append((group, entry))
        if graded:
            self.journal.append([entry for _, entry in graded])
        for each in graded:
            self._admit(*each)
        self.totals.update(answers)
        self.changed.notify_all()
        return answers

    def cut(self, *, partial: bool) -> CutBatch | None:
        """The next batch, without what has become too old; None if there is none, or no room on the disk to note it. Raises
        DataFailuresError."""
        self.failures.check()
        totals = self.totals
        try:
            self._drop_stale()
            delivered, trained = self._num_delivered_and_trained()
            batch = self.cutter.cut(delivered=delivered, trained=trained, partial=partial)
        except JournalFullError:
            return None
        if batch is None:
            return None
        for group in batch.groups[: batch.num_fresh]:
            if self.ledger.is_held(group.lease.key):  # not of a batch that the checkpoint knows as begun
                self._settle(group.lease.key)
        totals["trained"] += batch.num_fresh
        totals["replayed"] += len(batch.groups) - batch.num_fresh
        batch = batch._replace(arrivals=list(self._arrivals))
        self._arrivals.clear()
        return batch

    @locked
    def can_cut(self, *, partial: bool) -> bool:
        """Whether `cut` would find a batch now. Raises as that."""
        self.failures.check()
        try:
            self._drop_stale()
        except JournalFullError:
            return False
        delivered, trained = self._num_delivered_and_trained()
        return self.cutter.has_batch(delivered=delivered, trained=trained, partial=partial)

    def _drop_stale(self) -> None:
        for group in self.cutter.remove_stale():
            self.ledger.requeue(group.lease.key)
            self.totals["went_stale"] += 1

    def _num_delivered_and_trained(self) -> tuple[int, int]:
        """Groups that arrived, with and without signal, and groups that were trained, counting every time."""
        totals = self.totals
        return totals["accepted"] + totals["no_signal"], totals["trained"] + totals["replayed"]

    def _entry(self, delivery: Delivery) -> Entry:
        group = delivery.group
        outcome: Outcome = "accepted" if self.cutter.signal(group) > 0.0 else "no_signal"
        if group.policy_version < self.cutter.budget.oldest_usable(self.cutter.next_step):
            outcome = "stale"
        reward = self.mean_reward(group)
        return Entry(
            group.lease, delivery.producer, group.policy_version, outcome, None if math.isnan(reward) else reward,
            self.rules.grade(group), group.num_tokens, delivery.frame,
            delivery.missing,
        )  # fmt: skip

    def _admit(self, group: RolloutGroup, entry: Entry) -> None:
        key, outcome, grade = entry.lease.key, entry.outcome, entry.grade
        self.ledger.hold(entry.lease, Held(grade.verdict, entry.policy_version))
        self._arrivals.append(Arrival.of(group, outcome))
        if outcome == "stale":
            self.ledger.requeue(key)
            return
        self.failures.note()
        self.signals.note(group, entry.reward, has_signal=outcome == "accepted")
        numbers = (1, grade.num_scored, grade.num_successes)
        self.totals.update(dict(zip(attempt_counts(key.reroll), numbers, strict=True)))
        if outcome == "no_signal":
            self._settle(key)
        else:
            self.cutter.insert(group)

    # Prompts

    @locked
    def adopt(
        self, producer: str, lease_ids: Sequence[str], *, deadline: float, of_this_run: bool = True
    ) -> dict[str, bool | None]:
        """Says of each lease that a producer holds from before a silence or another trainer process: True if it may go on,
        False if it is not wanted, None if its group is in the journal already. If not `of_this_run` they may be another
        run's, unless this process gave them."""
        known = self.journal.known(lease_ids)
        result: dict[str, bool | None] = dict.fromkeys(lease_ids, False) | dict.fromkeys(known)
        for name in [name for name in result if name not in known]:
            with contextlib.suppress(UnknownLeaseError):
                lease = LeaseId.parse(name)
                result[name] = self.ledger.adopt(lease, producer, deadline=deadline, of_this_run=of_this_run)
        self.totals["adopted"] += sum(bool(wanted) for wanted in result.values())
        return result

    @locked
    def fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        """A lease ended without a group. Returns as `PromptTable.fail`. With JournalFullError the prompt would be given up, but
        the lease stays, and `expire` tries again."""

        def bury(work: Work[Key]) -> None:
            self._unburied.setdefault(lease_id, (reason, detail))
            self.journal.bury(DeadLetter(*work.key, work.attempt, failure_class(reason), reason, detail))
            self.totals["dead_letters"] += 1
            self.failures.note(f"{reason}: {detail}")

        again = self.ledger.leases.fail(lease_id, reason, now, bury)
        self._unburied.pop(lease_id, None)
        self.totals[f"failed_{reason}"] += again is not None
        return again

    @locked
    def expire(self, now: float) -> list[LeaseRecord[Key]]:
        """Takes back every lease whose deadline has passed. What could not end on a full disk ends now if it can."""
        overdue = self.ledger.leases.overdue(now)
        with contextlib.suppress(JournalFullError):
            for lease_id, (reason, detail) in list(self._unburied.items()):
                self.fail(lease_id, reason, detail, now)
        return self.take_back(overdue, "expired", now)

    def take_back(self, records: Sequence[LeaseRecord[Key]], reason: str, now: float) -> list[LeaseRecord[Key]]:
        """Returns the leases that ended; on a full disk the others stay, and `expire` tries again."""
        ended = []
        for record in records:
            with contextlib.suppress(JournalFullError):
                self.fail(record.lease_id, reason, f"leased to {record.producer}", now)
                ended.append(record)
        return ended

    def apply(self, recovered: Sequence[RecoveredPrompt]) -> None:
        """What the journal knows of prompts beyond the checkpoint."""
        for key, status, verdict, policy_version, is_new in recovered:
            # A reroll that went stale, and whose deferral is not known here, waits until that comes again.
            if not self.ledger.recall(key, Held(verdict, policy_version), is_new=is_new and status != "again"):
                continue
            if status == "again":
                self.ledger.requeue(key)
            elif status == "settled":
                self._settle(key)

    def _settle(self, key: Key) -> None:
        """The held prompt has had its group, trained or not; it may return, or sit out."""
        held = self.ledger.settle(key)
        version = self.rules.return_version(key, held.verdict, held.policy_version)
        if version is not None:
            self.totals["deferred"] += self.ledger.defer(key, version)
        until_epoch = self.rules.cooldown_until(key, held.verdict)
        if until_epoch is not None:
            self.totals["rested"] += 1
            self.ledger.order.cool_down(key.prompt_id, until_epoch)
