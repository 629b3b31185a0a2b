"""The rollout buffer: ledger, staleness budget and table behind one lock, shared by the two threads of the trainer.

Guarantee: the I/O thread leases and offers, the main thread cuts batches and publishes; every group offered gets one
outcome, every prompt one fate, and the numbers of `counts` add up. No method waits, except `next_batch`, which has a
timeout.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from protocol.errors import DataFailuresError
from replay.groups import RolloutGroup
from replay.ledger import LeaseRecord, PromptLedger
from replay.staleness import StalenessBudget
from replay.table import FifoTable

Outcome = Literal["accepted", "no_signal", "stale", "duplicate"]
PERMANENT_FAILURES = ("prompt_too_long", "bad_prompt")
FAILURE_WINDOW = 64
"""Answers over which the share of failures is judged."""


_REMEMBERED_ARRIVALS = 4096  # groups kept for statistics while no batch is cut


@dataclass(frozen=True)
class CutBatch:
    """The groups of one optimizer step, and everything that arrived since the batch before, for statistics."""

    step: int
    groups: list[RolloutGroup]
    arrivals: list[tuple[RolloutGroup, Outcome]]


class RolloutBuffer:
    """See the module's guarantee.

    Args:
        has_signal: whether a group can move the policy; others are settled at once and never trained.
        max_failed_share: `next_batch` raises when more than this share of the last answers were failures.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        budget: StalenessBudget,
        table: FifoTable,
        *,
        has_signal: Callable[[RolloutGroup], bool],
        max_failed_share: float,
    ) -> None:
        self._ledger = ledger
        self._budget = budget
        self._table = table
        self._has_signal = has_signal
        self._max_failed_share = max_failed_share
        self._changed = threading.Condition()
        self._keys: dict[str, tuple[int, int]] = {}  # group id -> ledger key, for groups in the table
        self._answers: deque[bool] = deque(maxlen=FAILURE_WINDOW)  # True: failed
        self._last_failure = ""
        self._arrivals: deque[tuple[RolloutGroup, Outcome]] = deque(maxlen=_REMEMBERED_ARRIVALS)
        self._next_step = 0
        self._version = -1  # nothing is published yet
        self.counts: Counter[str] = Counter()

    # The I/O thread's side.

    def lease(self, producer: str, *, now: float, timeout_s: float) -> LeaseRecord | None:
        """The next lease for `producer`, or None while the staleness budget is spent."""
        with self._changed:
            pending = self._ledger.num_leased + len(self._table)
            floor = self._budget.floor(pending, self._next_step)
            if floor > self._version:
                return None
            self.counts["leased"] += 1
            return self._ledger.lease(producer, policy_floor=floor, deadline=now + timeout_s)

    def offer(self, group: RolloutGroup) -> Outcome:
        """Decides what becomes of a finished group.

        Raises:
            UnknownLeaseError: its lease is not one of this trainer's.
        """
        with self._changed:
            item = self._ledger.complete(group.group_id)
            outcome = "duplicate" if item is None else self._admit(group, item.key)
            self.counts[outcome] += 1
            if outcome != "duplicate":
                self._answers.append(False)
                self._arrivals.append((group, outcome))
            self._changed.notify_all()
            return outcome

    def fail(self, lease_id: str, reason: str, detail: str) -> bool | None:
        """A lease came back as a failure. Returns as `PromptLedger.fail`: goes out again, is skipped, or is moot."""
        with self._changed:
            if reason == "returned":
                self._ledger.give_back(lease_id)
                self.counts["returned"] += 1
                return True
            again = self._ledger.fail(lease_id, permanent=reason in PERMANENT_FAILURES)
            self.counts[f"failed_{reason}"] += 1
            self.counts["prompts_skipped"] += again is False
            if again is not None:
                self._answers.append(True)
                self._last_failure = f"{reason}: {detail}"
                self._changed.notify_all()
            return again

    def expire(self, now: float) -> list[LeaseRecord]:
        with self._changed:
            expired = self._ledger.expire(now)
            self.counts["expired"] += len(expired)
            return expired

    def release(self, producer: str, keep: frozenset[str] = frozenset()) -> list[LeaseRecord]:
        with self._changed:
            released = self._ledger.release(producer, keep)
            self.counts["released"] += len(released)
            return released

    def leased_to(self, producer: str) -> set[str]:
        """The leases that `producer` has now."""
        with self._changed:
            return self._ledger.leased_to(producer)

    # The main thread's side.

    def next_batch(self, timeout_s: float) -> CutBatch | None:
        """Cuts the batch of the next step: `groups_per_step` groups with signal, none too stale. None if there is none
        within the timeout (or a little earlier, when something arrived that did not complete one).

        Raises:
            DataFailuresError: too many of the last answers were failures.
        """
        with self._changed:
            groups = self._cut()
            if groups is None:
                self._changed.wait(timeout_s)
                groups = self._cut()
            if groups is None:
                return None
            for group in groups:
                self._ledger.settle(self._keys.pop(group.group_id))
            batch = CutBatch(self._next_step, groups, list(self._arrivals))
            self._arrivals.clear()
            self.counts["trained"] += len(groups)
            self._next_step += self._budget.num_iterations
            return batch

    def published(self, version: int) -> None:
        """From now on producers can generate with `version`."""
        with self._changed:
            self._version = version

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: a run that restores it trains every prompt that was not trained before it."""
        with self._changed:
            return {"ledger": self._ledger.state(), "counts": dict(self.counts)}

    def restore(self, state: dict[str, Any], *, step: int) -> None:
        with self._changed:
            self._ledger.restore(state["ledger"])
            self.counts = Counter(state["counts"])
            self._next_step = step

    def depth(self) -> dict[str, int]:
        """How much is where, for messages and metrics."""
        with self._changed:
            return {"ready": len(self._table), "leased": self._ledger.num_leased, "epoch": self._ledger.epoch}

    # Both hold the lock.

    def _admit(self, group: RolloutGroup, key: tuple[int, int]) -> Outcome:
        if group.policy_version < self._budget.oldest_usable(self._next_step):
            self._ledger.requeue(key)
            return "stale"
        if not self._has_signal(group):
            self._ledger.settle(key)
            return "no_signal"
        self._table.insert(group)
        self._keys[group.group_id] = key
        return "accepted"

    def _cut(self) -> list[RolloutGroup] | None:
        failed = sum(self._answers)
        if len(self._answers) == FAILURE_WINDOW and failed > self._max_failed_share * FAILURE_WINDOW:
            raise DataFailuresError(
                f"{failed} of the last {FAILURE_WINDOW} answers of producers were failures, more than "
                f"pipeline.max_failed_share={self._max_failed_share} allows. The last one: {self._last_failure}"
            )
        for group in self._table.evict_older_than(self._budget.oldest_usable(self._next_step)):
            self._ledger.requeue(self._keys.pop(group.group_id))
            self.counts["went_stale"] += 1
        return self._table.cut(self._budget.groups_per_step)
