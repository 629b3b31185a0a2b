"""The rollout buffer: ledger, staleness budget, table and journal behind one lock, shared by the two threads of the trainer.

Guarantee: the I/O thread leases and offers, the main thread cuts batches and publishes. Every group offered gets one
outcome, every prompt one fate, and the numbers of `counts` add up. What a method decides is in the journal before anybody
sees it: a group before its outcome is returned, the batch of a step before the step begins. On a full disk nothing is
decided and nothing is lost; the same call succeeds later. No method waits but for the disk, except `next_batch`, which
has a timeout.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DataFailuresError
from replay import recovery
from replay.failures import failure_class
from replay.groups import GroupShape, RolloutGroup
from replay.journal import DeadLetter, Entry, Journal, JournalFullError
from replay.journal import Outcome as Decision
from replay.ledger import Key, LeaseRecord, PromptLedger, UnknownLeaseError, parse_lease_id
from replay.staleness import StalenessBudget
from replay.table import FifoTable

logger = logging.getLogger(__name__)

Outcome = Decision | Literal["duplicate", "unknown_lease"]
FAILURE_WINDOW = 64
"""Finished prompts over which the share of dead letters is judged."""

_REMEMBERED_ARRIVALS = 4096  # groups kept for statistics while no batch is cut


class Delivery(NamedTuple):
    """A group that arrived, with the frame that goes into the journal."""

    group: RolloutGroup
    frame: bytes
    producer: str


class CutBatch(NamedTuple):
    """The groups of the next optimizer steps, and everything that arrived since the batch before, for statistics."""

    step: int  # taken before the batch was first trained: its policy is the one that cut it
    num_iterations: int  # optimizer steps to take over it from now on
    last_step: int  # of them, counted from 1
    groups: list[RolloutGroup]
    arrivals: list[tuple[RolloutGroup, Decision]]


class RolloutBuffer:
    """See the module's guarantee.

    Args:
        has_signal: whether a group can move the policy; others are settled at once and never trained.
        reward_weights: (F,), for the mean reward that the journal shows.
        max_failed_share: `next_batch` raises when more than this share of the last finished prompts are dead letters.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        budget: StalenessBudget,
        table: FifoTable,
        journal: Journal,
        *,
        has_signal: Callable[[RolloutGroup], bool],
        reward_weights: NDArray[np.float32],
        max_failed_share: float,
    ) -> None:
        self._ledger = ledger
        self._budget = budget
        self._table = table
        self._journal = journal
        self._has_signal = has_signal
        self._weights = reward_weights
        self._max_failed_share = max_failed_share
        self._changed = threading.Condition()
        self._keys: dict[str, Key] = {}  # group id -> ledger key, for groups that wait to be trained
        self._recorded: deque[recovery.RecordedBatch] = deque()  # cut before a crash, to be cut again as they were
        self._load: Callable[[Sequence[str]], list[RolloutGroup]]
        self._fates: deque[bool] = deque(maxlen=FAILURE_WINDOW)  # of prompts; True: dead letter
        self._last_failure = ""
        self._arrivals: deque[tuple[RolloutGroup, Decision]] = deque(maxlen=_REMEMBERED_ARRIVALS)
        self._next_step = 0
        self._resumed_at = 0
        self._version = -1  # nothing is published yet
        self._newest_version = -1
        self.counts: Counter[str] = Counter()

    # The I/O thread's side.

    def lease(self, producer: str, *, now: float, timeout_s: float) -> LeaseRecord | None:
        """The next lease for `producer`, or None while the staleness budget is spent."""
        with self._changed:
            floor = self._budget.floor(self._ledger.num_leased + self._num_ready(), self._next_step)
            if floor > self._version:
                return None
            self.counts["leased"] += 1
            return self._ledger.lease(producer, policy_floor=floor, now=now, deadline=now + timeout_s)

    def adopt(self, producer: str, lease_ids: Sequence[str], *, deadline: float) -> dict[str, bool | None]:
        """Leases that `producer` holds from before a silence or another trainer process. For each: True if it may go
        on, False if it is not wanted, None if its group is in the journal already."""
        with self._changed:
            known = self._journal.known(lease_ids)
            result: dict[str, bool | None] = {}
            for lease_id in dict.fromkeys(lease_ids):
                try:
                    wanted = lease_id not in known and self._ledger.adopt(lease_id, producer, deadline=deadline)
                except UnknownLeaseError:
                    wanted = False
                result[lease_id] = None if lease_id in known else wanted
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
            if fresh:
                self._journal.append([self._entry(delivery, outcome) for delivery, outcome in fresh])
            for delivery, outcome in fresh:
                self._admit(delivery.group, outcome)
            self.counts.update(outcomes)
            self._changed.notify_all()
            return outcomes

    def fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        """A lease came back without a group. Returns as `PromptLedger.fail`: goes out again, is given up, or is moot.

        Raises:
            JournalFullError: the prompt would become a dead letter, but the disk is full; the lease stays.
        """
        with self._changed:
            return self._fail(lease_id, reason, detail, now)

    def give_back(self, lease_id: str) -> None:
        with self._changed:
            self._ledger.give_back(lease_id)
            self.counts["returned"] += 1

    def expire(self, now: float) -> list[LeaseRecord]:
        """Takes back every lease whose deadline has passed."""
        with self._changed:
            return self._take_back(self._ledger.overdue(now), "expired", now)

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

    def next_batch(self, timeout_s: float) -> CutBatch | None:
        """Cuts the batch of the next step: `groups_per_step` groups with signal, none too stale. None if there is none
        within the timeout (or a little earlier, when something arrived that did not complete one), or no room on the
        disk to note it.

        Raises:
            DataFailuresError: too many of the last prompts were given up.
        """
        with self._changed:
            batch = self._try_cut()
            if batch is None:
                self._changed.wait(timeout_s)
                batch = self._try_cut()
            return batch

    def published(self, version: int) -> None:
        """From now on producers can generate with `version`."""
        with self._changed:
            self._version = version

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, beside the journal, for a run that trains every prompt that was not trained before."""
        with self._changed:
            return {
                "ledger": self._ledger.state(),
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
            ValueError: the dataset has another size than at the checkpoint.
        """
        with self._changed:
            self._load = lambda group_ids: [shape.load(frame) for frame in self._journal.frames(group_ids)]
            if state is not None:
                self._ledger.restore(state["ledger"])
                self.counts.clear()
                self.counts.update(state["counts"])
            found = recovery.recover(
                self._journal,
                step,
                state["journal_seq"] if state else 0,
                self._budget,
                comparable=comparable,
            )
            self._apply_fates(found.fates)
            self._keys = found.keys
            self._recorded = deque(found.batches)
            for group in self._load(found.ready):
                self._table.insert(group)
            self._next_step = found.batches[0].step - 1 if found.batches else step
            self._resumed_at = step
            self._newest_version = self._journal.newest_version
            self.counts["quarantined"] += found.quarantined
            self.counts.update(found.outcomes)
            if found.keys or found.quarantined:
                logger.info(
                    "journal: %d groups ready, %d steps to train again as they were cut, %d groups quarantined",
                    len(found.ready),
                    len(found.batches),
                    found.quarantined,
                )

    def depth(self) -> dict[str, int]:
        """How much is where, for messages and metrics."""
        with self._changed:
            return {"ready": self._num_ready(), "leased": self._ledger.num_leased, "epoch": self._ledger.epoch}

    # Both hold the lock.

    def _num_ready(self) -> int:
        return len(self._table) + sum(len(batch.group_ids) for batch in self._recorded)

    def _judge(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        answered = self._journal.known(delivery.group.group_id for delivery in deliveries)
        taken: set[Key] = set()
        outcomes: list[Outcome] = []
        for group, _, _ in deliveries:
            try:
                key = self._ledger.find(group.group_id)
            except UnknownLeaseError:
                outcomes.append("unknown_lease")
                continue
            if group.group_id in answered or key is None or key in taken:
                outcomes.append("duplicate")
                continue
            answered.add(group.group_id)
            if group.policy_version < self._budget.oldest_usable(self._next_step):
                outcomes.append("stale")
                continue
            taken.add(key)
            outcomes.append("accepted" if self._has_signal(group) else "no_signal")
        return outcomes

    def _entry(self, delivery: Delivery, outcome: Decision) -> Entry:
        group = delivery.group
        (epoch, prompt_id), attempt = parse_lease_id(group.group_id)
        reward = group.mean_reward(self._weights)
        return Entry(
            group.group_id, epoch, prompt_id, attempt, delivery.producer, group.policy_version, outcome,
            None if np.isnan(reward) else reward, group.num_tokens, delivery.frame,
        )  # fmt: skip

    def _admit(self, group: RolloutGroup, outcome: Decision) -> None:
        key = self._ledger.hold(group.group_id).key
        self._arrivals.append((group, outcome))
        if outcome == "stale":
            self._ledger.requeue(key)
            return
        self._fates.append(False)
        if outcome == "no_signal":
            self._ledger.settle(key)
        else:
            self._table.insert(group)
            self._keys[group.group_id] = key

    def _take_back(self, records: Sequence[LeaseRecord], reason: str, now: float) -> list[LeaseRecord]:
        ended = []
        for record in records:
            try:
                self._fail(record.lease_id, reason, f"leased to {record.producer}", now)
            except JournalFullError:
                continue  # it stays a lease and runs into its deadline
            ended.append(record)
        return ended

    def _fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        spent = self._ledger.spent_by(lease_id, reason)
        if spent is not None:
            self._journal.bury(
                DeadLetter(spent.epoch, spent.prompt_id, spent.attempt, failure_class(reason), reason, detail)
            )
            self.counts["dead_letters"] += 1
            self._fates.append(True)
            self._last_failure = f"{reason}: {detail}"
            self._changed.notify_all()
        again = self._ledger.fail(lease_id, reason, now)
        self.counts[f"failed_{reason}"] += again is not None
        return again

    def _try_cut(self) -> CutBatch | None:
        failed = sum(self._fates)
        if len(self._fates) == FAILURE_WINDOW and failed > self._max_failed_share * FAILURE_WINDOW:
            raise DataFailuresError(
                f"{failed} of the last {FAILURE_WINDOW} prompts were given up, more than "
                f"pipeline.max_failed_share={self._max_failed_share} allows. The last one: {self._last_failure}"
            )
        try:
            return self._cut_again() if self._recorded else self._cut()
        except JournalFullError:
            return None

    def _cut_again(self) -> CutBatch:
        batch = self._recorded[0]
        groups = self._load(batch.group_ids)
        self._journal.claim(batch.step, batch.last_step, batch.group_ids)
        self._recorded.popleft()
        taken = max(0, self._resumed_at + 1 - batch.step)  # of its iterations, by the checkpoint
        return self._hand_over(batch.step - 1, taken, groups)

    def _cut(self) -> CutBatch | None:
        stale = self._table.older_than(self._budget.oldest_usable(self._next_step))
        if stale:
            self._journal.drop([group.group_id for group in stale], "stale")
            self._table.remove(stale)
            for group in stale:
                self._ledger.requeue(self._keys.pop(group.group_id))
            self.counts["went_stale"] += len(stale)
        groups = self._table.first(self._budget.groups_per_step)
        if groups is None:
            return None
        last_step = self._next_step + self._budget.num_iterations
        self._journal.claim(self._next_step + 1, last_step, [group.group_id for group in groups])
        self._table.remove(groups)
        return self._hand_over(self._next_step, 0, groups)

    def _hand_over(self, step: int, num_taken: int, groups: list[RolloutGroup]) -> CutBatch:
        for group in groups:
            key = self._keys.pop(group.group_id)
            if self._ledger.is_held(key):  # not of a batch that the checkpoint knows as begun
                self._ledger.settle(key)
        self._next_step = step + self._budget.num_iterations
        batch = CutBatch(step, self._budget.num_iterations - num_taken, self._next_step, groups, list(self._arrivals))
        self._arrivals.clear()
        self.counts["trained"] += len(groups)
        return batch

    def _apply_fates(self, fates: Sequence[tuple[Key, recovery.Fate]]) -> None:
        for key, fate in fates:
            if not self._ledger.recall(key):
                continue
            if fate == "settled":
                self._ledger.settle(key)
            elif fate == "again":
                self._ledger.requeue(key)
