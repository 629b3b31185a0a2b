"""The prompt ledger: which prompt goes out next, who holds it, and what became of it.

Guarantee: every prompt of an epoch is leased to one producer at a time and settled exactly once (trained, dropped or
given up); a lease that ends without a group goes out again, before any other prompt, and the first group to arrive wins.
A settled prompt may be deferred: it then returns, once its version is published, as another piece of work with a life of
its own. The order of fresh prompts is a function of the seed, the epoch and who rests. A lease id says which work it is
for, so that a lease given by a trainer process that is gone can still be answered.

    fresh -> leased -> held -> settled -> deferred    leased -> again: failed, expired, released, given back
               ^        |                    |        held -> again: the group went stale
             again <----+     leased <-------+        leased -> settled: its retry budget is spent
"""

from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from protocol.errors import DatasetError
from replay.prompts.failure_budgets import FailureClass, RetryBudget, failure_class, is_hopeless
from replay.prompts.rerolls import Key, RerollQueue


@dataclass(frozen=True)
class WorkItem:
    """One prompt in one epoch. `attempt` counts its leases; the failures, by class, those that failed."""

    epoch: int
    prompt_id: int
    reroll: int = 0  # times it had been deferred
    return_version: int = 0  # no older policy may answer it
    attempt: int = 0
    data_failures: int = 0
    infra_failures: int = 0

    @property
    def key(self) -> Key:
        return (self.epoch, self.prompt_id, self.reroll)

    def failures(self, of: FailureClass) -> int:
        return self.data_failures if of == "data" else self.infra_failures

    def failed(self, of: FailureClass) -> "WorkItem":
        return replace(self, **{f"{of}_failures": self.failures(of) + 1})


@dataclass(frozen=True)
class LeaseRecord:
    lease_id: str
    item: WorkItem
    producer: str
    policy_floor: int
    deadline: float  # of the caller's clock, seconds


class UnknownLeaseError(KeyError):
    """Not the id of a lease that a trainer of this run can have given."""


def parse_lease_id(lease_id: str) -> tuple[Key, int]:
    """The key of the work, and which of its leases it is.

    Raises:
        UnknownLeaseError: not of our making.
    """
    parts = lease_id.split("-")
    if len(parts) != 5 or not all(part.isdecimal() and len(part) < 16 for part in parts[:4]):
        raise UnknownLeaseError(lease_id)
    epoch, prompt_id, reroll, attempt = map(int, parts[:4])
    return (epoch, prompt_id, reroll), attempt


class PromptLedger:
    """See the module's guarantee. Times are of the caller's clock, in seconds.

    Args:
        num_prompts: size of the dataset; prompt ids are 0..num_prompts-1.
        seed: decides the order of every epoch.
        shuffle: False keeps the dataset's order.
        budgets: attempts and backoff, by failure class.
        session: part of every lease id, unique per trainer process.
        rerolls: holds what is deferred.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        seed: int,
        shuffle: bool,
        budgets: dict[FailureClass, RetryBudget],
        session: str,
        rerolls: RerollQueue,
    ) -> None:
        if num_prompts < 1:
            raise ValueError("a ledger needs at least one prompt")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._budgets = budgets
        self._session = session
        self._rerolls = rerolls
        self._rests: dict[int, int] = {}  # prompt -> the last epoch that it sits out
        self._answered: set[Key] = set()  # returned, and had their group, before a crash undid their deferral
        self._again: dict[Key, float] = {}  # what goes out again, in this order, and not before when
        self._open: dict[Key, WorkItem] = {}  # leased or going out again: unanswered
        self._held: dict[Key, WorkItem] = {}  # answered, not yet settled
        self._leases: dict[str, LeaseRecord] = {}
        self._begin_epoch(0)

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def num_deferred(self) -> int:
        return len(self._rerolls)

    @property
    def epoch(self) -> int:
        return self._epoch

    # Leases

    def lease(self, producer: str, *, version: int, policy_floor: int, now: float, deadline: float) -> LeaseRecord:
        """Gives the next prompt to `producer`: one that goes out again if one is due, else one that was deferred if it
        may return, else the next fresh one.

        Args:
            version: the newest policy that is published.
            policy_floor: the oldest policy that may answer.
        """
        item = self._next_again(version, now) or self._next_work(version)
        item = replace(item, attempt=item.attempt + 1)
        lease_id = f"{item.epoch}-{item.prompt_id}-{item.reroll}-{item.attempt}-{self._session}"
        floor = max(policy_floor, item.return_version)
        return self._give(LeaseRecord(lease_id, item, producer, floor, deadline))

    def hand_over(self, lease_id: str, producer: str, *, deadline: float) -> bool:
        """The lease is `producer`'s from now on. False if its prompt is answered or the lease has ended; then it is none."""
        record = self._leases.pop(lease_id, None)
        if record is None or record.item.key not in self._open:
            return False
        self._leases[lease_id] = replace(record, producer=producer, deadline=deadline)
        return True

    def adopt(self, lease_id: str, producer: str, *, deadline: float, of_this_run: bool = True) -> bool:
        """A producer still works on a lease of the trainer process before this one. Returns whether it may go on: not
        when the prompt is answered, or leased to somebody else by now.

        Args:
            of_this_run: as of `find`.

        Raises:
            UnknownLeaseError: not a lease of this run.
        """
        key = self.find(lease_id, of_this_run=of_this_run)
        if key is None or self._is_leased(key):
            return False
        self._reach(key)
        item = replace(self._open[key], attempt=max(self._open[key].attempt, self._parse(lease_id)[1]))
        self._give(LeaseRecord(lease_id, item, producer, 0, deadline))
        return True

    def find(self, lease_id: str, *, of_this_run: bool = True) -> Key | None:
        """The prompt that a group with this id would answer; None if it is answered or given up.

        Args:
            of_this_run: False if the lease may be of another run, unless this process gave it.

        Raises:
            UnknownLeaseError: not a lease of this run.
        """
        if not of_this_run and not lease_id.endswith(f"-{self._session}"):
            raise UnknownLeaseError(lease_id)
        key, _ = self._parse(lease_id)
        return key if key in self._open or key in self._rerolls or self._is_fresh(key) else None

    def hold(self, lease_id: str) -> WorkItem:
        """The prompt that `find` named has its group; held until settled or requeued. What was held in between may have
        moved the cursor past it: then it rests, or its return was withdrawn, and it is held all the same."""
        key, _ = self._parse(lease_id)
        self._reach(key)
        self._leases.pop(lease_id, None)
        self._again.pop(key, None)
        self._held[key] = self._open.pop(key, WorkItem(*key))
        return self._held[key]

    def fail(self, lease_id: str, reason: str, now: float) -> bool | None:
        """The lease ended without a group. Returns True if the prompt goes out again, False if its budget is spent and
        it is settled, and None if it makes no difference: the lease had ended before."""
        record = self._leases.pop(lease_id, None)
        if record is None or record.item.key not in self._open:
            return None
        key, of = record.item.key, failure_class(reason)
        item = self._open[key].failed(of)
        if self._is_spent(item, reason):
            del self._open[key]
            return False
        self._open[key] = item
        self._again[key] = now + self._budgets[of].delay_s(item.failures(of))
        return True

    def spent_by(self, lease_id: str, reason: str) -> WorkItem | None:
        """The item that `fail` with the same arguments would give up, with this failure counted; changes nothing."""
        record = self._leases.get(lease_id)
        if record is None or record.item.key not in self._open:
            return None
        item = self._open[record.item.key].failed(failure_class(reason))
        return item if self._is_spent(item, reason) else None

    def give_back(self, lease_id: str) -> None:
        """The producer hands the lease back unanswered; the prompt goes out again, and no failure is counted."""
        record = self._leases.pop(lease_id, None)
        if record is not None and record.item.key in self._open:
            self._again[record.item.key] = 0.0

    def overdue(self, now: float) -> list[LeaseRecord]:
        return [record for record in self._leases.values() if record.deadline <= now]

    def leases_of(self, producer: str) -> list[LeaseRecord]:
        return [record for record in self._leases.values() if record.producer == producer]

    # Held prompts

    def is_held(self, key: Key) -> bool:
        return key in self._held

    def settle(self, key: Key) -> None:
        """The held item was trained or dropped for good."""
        del self._held[key]

    def requeue(self, key: Key) -> None:
        """The held item's group is unusable through no fault of the prompt (stale): it goes out again, unless it is
        out already (its group was a late one)."""
        self._open[key] = self._held.pop(key)
        if not self._is_leased(key):
            self._again[key] = 0.0

    # Settled prompts

    def defer(self, key: Key, version: int) -> bool:
        """The prompt of the settled item returns when `version` is published. False if it waits already, has had that
        return (before a crash), or has had its own turn of a later epoch."""
        epoch, prompt_id, reroll = key
        returning = (epoch, prompt_id, reroll + 1)
        if returning in self._answered:
            self._answered.remove(returning)
            return False
        return self._is_fresh((epoch + 1, prompt_id, 0)) and self._rerolls.defer(returning, version)

    def rest(self, prompt_id: int, until_epoch: int) -> None:
        """The prompt sits out every epoch up to this one. When all would, all come back."""
        self._rests[prompt_id] = max(until_epoch, self._rests.get(prompt_id, 0))

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Everything unsettled, as plain data; `restore` makes it go out again."""
        unsettled = [*self._open.values(), *self._held.values()]
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": self._num_prompts,
            "unsettled": [list(astuple(item)) for item in unsettled],
            "deferred": self._rerolls.state(),
            "resting": [[prompt_id, until] for prompt_id, until in self._rests.items()],
            "answered": [list(key) for key in sorted(self._answered) if self._may_return(key)],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`, on a fresh ledger of the same dataset.

        Raises:
            DatasetError: the dataset has another size than when the state was written.
        """
        if state["num_prompts"] != self._num_prompts:
            raise DatasetError(
                f"dataset: the dataset has {self._num_prompts} prompts now and had {state['num_prompts']} at the checkpoint; "
                "go on with the old one, or choose another run_dir"
            )
        self._begin_epoch(state["epoch"])
        self._rests = dict(state["resting"])  # after it: when all rest, they come back with the next epoch
        self._rerolls.restore(state["deferred"])
        self._answered = {(epoch, prompt_id, reroll) for epoch, prompt_id, reroll in state["answered"]}
        self._position = state["position"]
        self._open = {item.key: item for item in (WorkItem(*values) for values in state["unsettled"])}
        self._again = dict.fromkeys(self._open, 0.0)

    def recall(self, key: Key, *, is_new: bool) -> bool:
        """The journal holds the fate of this prompt: it is held from now on. False if it was settled in the restored
        state, or is held already.

        Args:
            is_new: it was answered after that state was taken, which therefore cannot have settled it.
        """
        self._reach(key)
        if is_new and key not in self._open and key not in self._held:
            # Leased before its prompt came to rest, or when it had been deferred: which this process knows of later.
            self._open[key] = WorkItem(*key)
            if key[2] > 0:
                self._answered.add(key)
        if key not in self._open:
            return False
        self._again.pop(key, None)
        self._held[key] = self._open.pop(key)
        return True

    # Underneath

    def _give(self, record: LeaseRecord) -> LeaseRecord:
        self._again.pop(record.item.key, None)
        self._open[record.item.key] = record.item
        self._leases[record.lease_id] = record
        return record

    def _is_spent(self, item: WorkItem, reason: str) -> bool:
        of = failure_class(reason)
        return is_hopeless(reason) or item.failures(of) >= self._budgets[of].max_attempts

    def _may_return(self, key: Key) -> bool:
        """Whether what a reroll would return from is not settled yet."""
        before = (key[0], key[1], key[2] - 1)
        return before in self._open or before in self._held or before in self._rerolls or self._is_fresh(before)

    def _is_leased(self, key: Key) -> bool:
        return any(record.item.key == key for record in self._leases.values())

    def _parse(self, lease_id: str) -> tuple[Key, int]:
        """As `parse_lease_id`, for a lease that this ledger can have given: of an epoch up to the next one, because a
        crash may have set its cursor back."""
        key, attempt = parse_lease_id(lease_id)
        if key[1] >= self._num_prompts or attempt < 1 or key[0] > self._epoch + 1:
            raise UnknownLeaseError(lease_id)
        return key, attempt

    def _next_again(self, version: int, now: float) -> WorkItem | None:
        items = (self._open[key] for key, not_before in self._again.items() if not_before <= now)
        return next((item for item in items if item.return_version <= version), None)

    def _next_work(self, version: int) -> WorkItem:
        deferred = self._rerolls.next_due(version)
        self._rerolls.count_lease(deferred is not None)
        return self._next_fresh() if deferred is None else self._return(deferred)

    def _return(self, key: Key) -> WorkItem:
        return WorkItem(*key, return_version=self._rerolls.remove(key))

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = self._epoch_order(epoch)
        self._ranks = np.argsort(self._order)  # the place of every prompt in this epoch's order
        self._rests = {prompt_id: until for prompt_id, until in self._rests.items() if until >= epoch}
        if len(self._rests) == self._num_prompts:
            self._rests = {}

    def _epoch_order(self, epoch: int) -> Any:
        if not self._shuffle:
            return np.arange(self._num_prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)

    def _is_fresh(self, key: Key) -> bool:
        epoch, prompt_id, reroll = key
        is_ahead = epoch > self._epoch or (epoch == self._epoch and int(self._ranks[prompt_id]) >= self._position)
        return reroll == 0 and is_ahead

    def _next_fresh(self, wanted: Key | None = None) -> WorkItem:
        """The next prompt in order that does not rest, or is `wanted`."""
        while True:
            if self._position == self._num_prompts:
                self._begin_epoch(self._epoch + 1)
            item = WorkItem(self._epoch, int(self._order[self._position]))
            self._position += 1
            if item.key == wanted or self._rests.get(item.prompt_id, -1) < self._epoch:
                self._rerolls.withdraw(item.prompt_id)
                return item

    def _reach(self, key: Key) -> None:
        """Moves the cursor past `key`, or ends its wait; what the cursor passes goes out again."""
        if key in self._rerolls:
            self._reopen(self._return(key))
        while self._is_fresh(key):
            self._reopen(self._next_fresh(key))

    def _reopen(self, item: WorkItem) -> None:
        self._open[item.key] = item
        self._again[item.key] = 0.0
