"""What becomes of groups, from their arrival to the batch that trains them.

Guarantee: every offered group gets one answer, and what is computed of it is computed once. A group is in the journal before
anything else knows of it. Not thread-safe: the rollout buffer holds its lock.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

from replay.batches.cutting import BatchCutter, CutBatch
from replay.batches.delivery import Arrival, Delivery, GradedGroup
from replay.batches.signal_watch import SignalWatch
from replay.groups import RolloutGroup
from replay.journal.database import JournalFullError
from replay.journal.recovery import attempt_counts
from replay.journal.tables import Outcome
from replay.journal.writer import Journal
from replay.lease_ids import Key, UnknownLeaseError
from replay.prompt_lifecycle import PromptLifecycle
from replay.prompts.leases import Held
from replay.prompts.ledger import PromptLedger
from replay.prompts.rerolls import RerollRules

Answer = Outcome | Literal["duplicate", "unknown_lease"]
_REMEMBERED_ARRIVALS = 4096  # groups that the report of a step speaks of, the newest


class GroupLifecycle:
    """See the module's guarantee.

    Args:
        mean_reward: of a group, for the journal to show; NaN if nothing is scored.
        totals: of what has happened, which this adds to.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        cutter: BatchCutter,
        journal: Journal,
        prompts: PromptLifecycle,
        signal_watch: SignalWatch,
        rules: RerollRules,
        mean_reward: Callable[[RolloutGroup], float],
        totals: Counter[str],
    ) -> None:
        self._ledger = ledger
        self._cutter = cutter
        self._journal = journal
        self._prompts = prompts
        self._signal_watch = signal_watch
        self._rules = rules
        self._mean_reward = mean_reward
        self._totals = totals
        self._arrivals: deque[Arrival] = deque(maxlen=_REMEMBERED_ARRIVALS)  # since the last batch

    def offer(self, deliveries: Sequence[Delivery]) -> list[Answer]:
        """Returns the answers to the groups, in their order.

        Raises:
            JournalFullError: the disk is full, and nothing was decided.
        """
        answers, graded = self._grade(deliveries)
        if graded:
            self._journal.append([each.entry() for each in graded])
        for each in graded:
            self._admit(each)
        self._totals.update(answers)
        return answers

    def cut(self, *, partial: bool) -> CutBatch | None:
        """The next batch, without what has become too old; None if there is none, or no room on the disk to note it.

        Raises:
            DataFailuresError: too many of the last prompts were given up.
        """
        self._prompts.check()
        totals = self._totals
        try:
            for group in self._cutter.remove_stale():
                self._ledger.requeue(group.lease.key)
                totals["went_stale"] += 1
            delivered, trained = totals["accepted"] + totals["no_signal"], totals["trained"] + totals["replayed"]
            batch = self._cutter.cut(delivered=delivered, trained=trained, partial=partial)
        except JournalFullError:
            return None
        if batch is None:
            return None
        for group in batch.groups[: batch.num_fresh]:
            if self._ledger.is_held(group.lease.key):  # not of a batch that the checkpoint knows as begun
                self._prompts.settle(group.lease.key)
        totals["trained"] += batch.num_fresh
        totals["replayed"] += len(batch.groups) - batch.num_fresh
        batch = batch._replace(arrivals=list(self._arrivals))
        self._arrivals.clear()
        return batch

    def _grade(self, deliveries: Sequence[Delivery]) -> tuple[list[Answer], list[GradedGroup]]:
        """The answers to all, and what is computed of those that go into the journal."""
        answered = self._journal.known(delivery.group.group_id for delivery in deliveries)
        taken: set[Key] = set()
        answers: list[Answer] = []
        graded: list[GradedGroup] = []
        for delivery in deliveries:
            group = delivery.group
            try:
                key = self._ledger.find(group.lease, of_this_run=delivery.of_this_run)
            except UnknownLeaseError:
                answers.append("unknown_lease")
                continue
            if group.group_id in answered or key is None or key in taken:
                answers.append("duplicate")
                continue
            answered.add(group.group_id)
            signal = self._cutter.signal(group)
            outcome: Outcome = "accepted" if signal > 0.0 else "no_signal"
            if group.policy_version < self._cutter.budget.oldest_usable(self._cutter.next_step):
                outcome = "stale"
            else:
                taken.add(key)
            answers.append(outcome)
            graded.append(GradedGroup(delivery, outcome, signal, self._mean_reward(group), self._rules.grade(group)))
        return answers, graded

    def _admit(self, graded: GradedGroup) -> None:
        group, outcome, grade = graded.delivery.group, graded.outcome, graded.grade
        key = group.lease.key
        self._ledger.hold(group.lease, Held(grade.verdict, group.policy_version))
        self._arrivals.append(Arrival.of(group, outcome))
        if outcome == "stale":
            self._ledger.requeue(key)
            return
        self._prompts.answered()
        self._signal_watch.note(group, graded.mean_reward, has_signal=outcome == "accepted")
        numbers = (1, grade.num_scored, grade.num_successes)
        self._totals.update(dict(zip(attempt_counts(key.reroll), numbers, strict=True)))
        if outcome == "no_signal":
            self._prompts.settle(key)
        else:
            self._cutter.insert(group, graded.signal)
