"""The prompt ledger: which prompt goes out next, who holds it, and what became of it.

Guarantee: every prompt of an epoch is leased to one producer at a time and settled exactly once (trained, dropped or
skipped); a lease that expires or whose producer leaves goes out again, before any fresh prompt, and the first result to
arrive wins. A lease is answered once: what comes again for it changes nothing. The order is a function of the seed and
the epoch alone.

    fresh -> leased -> held -> settled          leased -> again: expired, released, failed, given back
               ^        |                       held -> again: the group went stale
             again <----+
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_REMEMBERED_LEASES = 8192  # ended leases whose late or repeated results are still recognized


@dataclass(frozen=True)
class WorkItem:
    """One prompt in one epoch. `attempt` counts its leases, `failures` the answers that were failures."""

    epoch: int
    prompt_id: int
    attempt: int = 0
    failures: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return (self.epoch, self.prompt_id)


@dataclass(frozen=True)
class LeaseRecord:
    lease_id: str
    item: WorkItem
    producer: str
    policy_floor: int
    deadline: float  # of the caller's clock, seconds


class UnknownLeaseError(KeyError):
    """A lease id that this ledger never gave out, or has long forgotten."""


class PromptLedger:
    """See the module's guarantee.

    Args:
        num_prompts: size of the dataset; prompt ids are 0..num_prompts-1.
        seed: decides the order of every epoch.
        shuffle: False keeps the dataset's order.
        max_attempts: failures after which a prompt is skipped for this epoch.
        session: prefix of lease ids, unique per trainer process.
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool, max_attempts: int, session: str) -> None:
        if num_prompts < 1:
            raise ValueError("a ledger needs at least one prompt")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._max_attempts = max_attempts
        self._session = session
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)
        self._again: deque[tuple[int, int]] = deque()  # keys that go out again, in this order
        self._open: dict[tuple[int, int], WorkItem] = {}  # leased or going out again: unanswered
        self._held: dict[tuple[int, int], WorkItem] = {}  # answered, not yet settled
        self._leases: dict[str, LeaseRecord] = {}
        self._ended: OrderedDict[str, LeaseRecord | None] = OrderedDict()  # None: answered, not only taken back
        self._num_given = 0

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def epoch(self) -> int:
        return self._epoch

    def lease(self, producer: str, *, policy_floor: int, deadline: float) -> LeaseRecord:
        """Gives the next prompt to `producer`: one that goes out again if there is any, else the next fresh one."""
        item = self._open[self._again.popleft()] if self._again else self._next_fresh()
        item = replace(item, attempt=item.attempt + 1)
        self._open[item.key] = item
        self._num_given += 1
        record = LeaseRecord(f"{self._session}-{self._num_given}", item, producer, policy_floor, deadline)
        self._leases[record.lease_id] = record
        return record

    def complete(self, lease_id: str) -> WorkItem | None:
        """A result arrived. Returns its item, now held until settled, or None if another result (or this one) came
        first.

        Raises:
            UnknownLeaseError: not a lease of this ledger.
        """
        key = self._close(lease_id)
        if key is None or key not in self._open:
            return None
        if key in self._again:
            self._again.remove(key)
        self._held[key] = self._open.pop(key)
        return self._held[key]

    def fail(self, lease_id: str, *, permanent: bool = False) -> bool | None:
        """The producer could not answer. Returns True if the prompt goes out again, False if it is skipped for this
        epoch, and None if it makes no difference: the prompt was answered, leased again or taken back meanwhile.

        Args:
            permanent: the prompt can never be answered (too long, malformed).

        Raises:
            UnknownLeaseError: not a lease of this ledger.
        """
        key = self._close(lease_id)
        if key is None or key not in self._open or key in self._again or self._is_leased(key):
            return None
        item = replace(self._open[key], failures=self._open[key].failures + 1)
        if permanent or item.failures >= self._max_attempts:
            del self._open[key]
            return False
        self._open[key] = item
        self._again.append(key)
        return True

    def give_back(self, lease_id: str) -> None:
        """The producer hands the lease back unanswered; the prompt goes out again, and no failure is counted.

        Raises:
            UnknownLeaseError: not a lease of this ledger.
        """
        self._send_out_again(self._close(lease_id))

    def expire(self, now: float) -> list[LeaseRecord]:
        """Takes back every lease whose deadline has passed."""
        return self._take_back([record for record in self._leases.values() if record.deadline <= now])

    def release(self, producer: str, keep: frozenset[str] = frozenset()) -> list[LeaseRecord]:
        """Takes back the leases of a producer that left, except those it still holds."""
        return self._take_back([r for r in self._leases.values() if r.producer == producer and r.lease_id not in keep])

    def leased_to(self, producer: str) -> set[str]:
        return {record.lease_id for record in self._leases.values() if record.producer == producer}

    def settle(self, key: tuple[int, int]) -> None:
        """The held item was trained or dropped for good."""
        del self._held[key]

    def requeue(self, key: tuple[int, int]) -> None:
        """The held item's group is unusable through no fault of the prompt (stale): it goes out again, unless it is
        out already (its result was a late one)."""
        self._open[key] = self._held.pop(key)
        self._send_out_again(key)

    def state(self) -> dict[str, Any]:
        """Everything unsettled, as plain data; `restore` makes it go out again."""
        unsettled = [*self._open.values(), *self._held.values()]
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": self._num_prompts,
            "unsettled": [[i.epoch, i.prompt_id, i.attempt, i.failures] for i in unsettled],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`, on a fresh ledger of the same dataset.

        Raises:
            ValueError: the dataset has another size than when the state was written.
        """
        if state["num_prompts"] != self._num_prompts:
            raise ValueError(
                f"the dataset has {self._num_prompts} prompts now and had {state['num_prompts']} at the checkpoint"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order(self._epoch)
        self._open = {item.key: item for item in (WorkItem(*values) for values in state["unsettled"])}
        self._again = deque(self._open)

    def _next_fresh(self) -> WorkItem:
        if self._position == self._num_prompts:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order(self._epoch)
        self._position += 1
        return WorkItem(self._epoch, int(self._order[self._position - 1]))

    def _epoch_order(self, epoch: int) -> Any:
        if not self._shuffle:
            return range(self._num_prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)

    def _close(self, lease_id: str) -> tuple[int, int] | None:
        """Ends a lease as answered and returns its key; None if it was answered before."""
        if lease_id not in self._leases and lease_id not in self._ended:
            raise UnknownLeaseError(lease_id)
        record = self._leases.get(lease_id) or self._ended[lease_id]
        self._end(lease_id, None)
        return None if record is None else record.item.key

    def _end(self, lease_id: str, record: LeaseRecord | None) -> None:
        self._leases.pop(lease_id, None)
        self._ended[lease_id] = record
        while len(self._ended) > _REMEMBERED_LEASES:
            self._ended.popitem(last=False)

    def _is_leased(self, key: tuple[int, int]) -> bool:
        return any(record.item.key == key for record in self._leases.values())

    def _send_out_again(self, key: tuple[int, int] | None) -> None:
        if key is not None and key in self._open and key not in self._again and not self._is_leased(key):
            self._again.append(key)

    def _take_back(self, records: list[LeaseRecord]) -> list[LeaseRecord]:
        for record in records:
            self._end(record.lease_id, record)
            self._send_out_again(record.item.key)
        return records
