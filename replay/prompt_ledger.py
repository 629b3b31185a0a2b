"""The prompt ledger: which prompt is leased next, who has it, and what becomes of it.

Guarantee: every prompt of an epoch, but for those that are not asked (`replay.prompt_draws`), is with one producer at a time and
is done exactly once (trained, dropped or failed for good). A lease that ends without a group makes its prompt wait again, and it
then goes before all others; the first group to arrive wins. A prompt that is done may be deferred: it returns, once its version
is published, under a key of its own. A lease id tells which key it is for, so a lease that an earlier trainer process gave can
still be answered.

    first attempt ------> leased --> held --> done -----> deferred
                           |   ^       |                     |
                           v   |       v                     |
                          waiting <----+        leased <-----+

A prompt is one entry of a `PromptTable`, with its status. A prompt that is not in the table is ahead in the epoch's order, or
done. The order follows from the seed, the epoch, the prompts in cooldown and the draws in the journal, so a checkpoint needs only
a cursor and the cooldowns. It is computed place by place: neither time nor memory of an epoch's beginning grows with the dataset,
except for the prompts in cooldown.
"""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from protocol.config.learning import RerollSection
from protocol.errors import DataFailuresError, DatasetError
from replay.lease_ids import Key, LeaseId, UnknownLeaseError
from replay.prompt_draws import BLOCK, PromptDraws
from replay.prompt_table import (
    Deferred,
    FailureClass,
    Held,
    Leased,
    LeaseRecord,
    PromptTable,
    PromptTask,
    RetryBudget,
    Waiting,
)
from replay.rerolls import RerollShare
from replay.shares import MOST_PUT_OFF, NEWEST

_ROUNDS = 8
_WORD = 2**64 - 1


class Permutation:
    """A permutation of 0..size-1 that follows from a text.

    It is a Feistel network over the smallest square that holds all numbers; a number outside goes through it again until one is
    inside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    def __init__(self, size: int, text: str) -> None:
        self._size = size
        self._side = math.isqrt(size - 1) + 1
        digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def at(self, place: int) -> int:
        """The number at this place."""
        number = place
        while True:
            left, right = divmod(number, self._side)
            for key in self._keys:
                left, right = right, (left + _mixed(right + key)) % self._side
            number = left * self._side + right
            if number < self._size:
                return number

    def place_of(self, number: int) -> int:
        """The place of this number."""
        place = number
        while True:
            left, right = divmod(place, self._side)
            for key in reversed(self._keys):
                left, right = (right - _mixed(left + key)) % self._side, left
            place = left * self._side + right
            if place < self._size:
                return place


def _mixed(value: int) -> int:
    """64 bits; each depends on all bits of the value (the finalizer of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


class EpochOrder:
    """The order of an epoch's first attempts. Prompt ids are 0..num_prompts-1; without `shuffle` they keep their order. With
    `draws` some of them are not asked in the epoch. Prompts that are closed are passed over.

    Attributes:
        num_skipped: first attempts that were not asked so far.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        *,
        shuffle: bool,
        draws: PromptDraws | None = None,
        is_closed: Callable[[int], bool] = lambda prompt_id: False,
    ) -> None:
        self.num_prompts = num_prompts
        self.num_skipped = 0
        self._seed = seed
        self._shuffle = shuffle
        self._draws = draws
        self._is_closed = is_closed
        self._cooldowns: dict[int, int] = {}  # prompt -> the last epoch that it sits out
        self._block = -1  # of the epoch's order, the one that was looked at last
        self._asked: list[bool] = []  # for each of its places
        self._begin_epoch(0)

    def next(self, wanted: Key | None = None) -> Key:
        """Move the cursor to the next prompt that is asked and not in cooldown, or is `wanted`. Raise DataFailuresError if an
        epoch has none that is open."""
        may_come = True
        while True:
            if self._position == self.num_prompts:
                if not may_come and not self._cooldowns:
                    raise DataFailuresError(
                        "environments: those that are left have no prompts that dataset.curriculum opens now; repair those that "
                        "were skipped, then go on with --resume"
                    )
                self._begin_epoch(self.epoch + 1)
                may_come = False
            key = Key(self.epoch, self._prompt_at(self._position))
            is_asked = self._is_asked(self._position)
            self._position += 1
            if key == wanted:
                return key
            if self._is_closed(key.prompt_id):
                continue
            may_come = may_come or self._draws is None or self._draws.share(key.prompt_id) > 0.0
            if self._cooldowns.get(key.prompt_id, -1) < self.epoch:
                if is_asked:
                    return key
                self.num_skipped += 1

    def is_ahead(self, key: Key) -> bool:
        """Return whether this first attempt is still to come."""
        if key.reroll > 0 or key.epoch != self.epoch:
            return key.reroll == 0 and key.epoch > self.epoch
        place = self._order.place_of(key.prompt_id) if self._order else key.prompt_id
        return bool(place >= self._position)

    def _prompt_at(self, place: int) -> int:
        return self._order.at(place) if self._order else place

    def _is_asked(self, place: int) -> bool:
        """Return whether the prompt at this place is asked; decide on its block, if that is not decided."""
        if self._draws is None:
            return True
        block, inside = divmod(place, BLOCK)
        if self._block != block:
            places = range(block * BLOCK, min((block + 1) * BLOCK, self.num_prompts))
            prompt_ids = [self._prompt_at(each) for each in places]
            can_come = [
                prompt_id
                if self._cooldowns.get(prompt_id, -1) < self.epoch and not self._is_closed(prompt_id)
                else None
                for prompt_id in prompt_ids
            ]
            self._asked = self._draws.asked(self.epoch, block, can_come)
            self._block = block
        return self._asked[inside]

    def cool_down(self, prompt_id: int, until_epoch: int) -> None:
        """The prompt sits out every epoch up to this one. When all would, all come back."""
        self._cooldowns[prompt_id] = max(until_epoch, self._cooldowns.get(prompt_id, 0))

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self._position,
            "num_prompts": self.num_prompts,
            "skipped": self.num_skipped,
            "resting": [[prompt_id, until] for prompt_id, until in self._cooldowns.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raise DatasetError if the dataset has another size than when the state was written."""
        if state["num_prompts"] != self.num_prompts:
            raise DatasetError(
                f"dataset: the dataset has {self.num_prompts} prompts now and had {state['num_prompts']} at the checkpoint; "
                "go on with the old one, or choose another run_dir"
            )
        self._begin_epoch(state["epoch"])
        self._cooldowns = dict(state["resting"])  # only now: if all are in cooldown, they come back with the next epoch
        self._position, self.num_skipped = state["position"], state["skipped"]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._position = epoch, 0
        self._block, self._asked = -1, []
        self._order = Permutation(self.num_prompts, f"{self._seed} {epoch}") if self._shuffle else None
        self._cooldowns = {prompt_id: until for prompt_id, until in self._cooldowns.items() if until >= epoch}
        if len(self._cooldowns) == self.num_prompts:
            self._cooldowns = {}


class PromptLedger:
    """Leases the prompts of a dataset. Times are of the caller's clock, in seconds; `session` is unique per trainer process."""

    def __init__(
        self,
        num_prompts: int,
        *,
        seed: int,
        shuffle: bool,
        budgets: Mapping[FailureClass, RetryBudget],
        session: str,
        rerolls: RerollSection,
        draws: PromptDraws | None = None,
        environment_of: Callable[[int], str] = lambda prompt_id: "",
    ) -> None:
        self.order = EpochOrder(num_prompts, seed, shuffle=shuffle, draws=draws, is_closed=self._is_closed)
        self.draws = draws
        self.environment_of = environment_of
        self._closed: frozenset[str] = frozenset()
        self.newest: Counter[str] = Counter()  # the environments of the newest first attempts
        self._newest: deque[str] = deque()
        self.leases: PromptTable[Key] = PromptTable(budgets, lambda key: environment_of(key.prompt_id))
        self._session = session
        self._max_deferred = rerolls.max_pending
        self._share = RerollShare(rerolls.max_share)
        self._returns: dict[int, Key] = {}  # of the deferred prompts, by prompt id
        self._answered_early: set[Key] = set()  # returns that had their group before a crash undid their deferral

    @property
    def num_deferred(self) -> int:
        return self.leases.count(Deferred)

    # Leases

    def lease(
        self,
        producer: str,
        *,
        version: int,
        policy_floor: int,
        now: float,
        deadline: float,
        full: Collection[str] = (),
    ) -> LeaseRecord[Key] | None:
        """Lease the next prompt to `producer`: one that waits if one is due, else one that was deferred if it may return, else
        the next first attempt. `version` is the newest policy that it may serve, `policy_floor` the oldest that may answer.
        Prompts of environments that are `full` are put off; None if too many of them wait."""
        without = self._closed.union(full)
        task = self.leases.next_waiting(now, version, without) or self._next_task(version, full)
        if task is None:
            return None
        task = replace(task, attempt=task.attempt + 1)
        lease_id = str(LeaseId(task.key, task.attempt, self._session))
        return self.leases.lease(LeaseRecord(lease_id, task, producer, max(policy_floor, task.min_version), deadline))

    def close(self, environment: str) -> None:
        """Lease no more prompts of an environment: its first attempts are passed over, what waits goes on waiting, and its
        deferred prompts do not return."""
        self._closed |= {environment}

    def _is_closed(self, prompt_id: int) -> bool:
        return bool(self._closed) and self.environment_of(prompt_id) in self._closed

    def adopt(self, lease: LeaseId, producer: str, *, deadline: float, of_this_run: bool = True) -> bool:
        """A producer still works on a lease of an earlier trainer process. Returns whether it may go on: not when the prompt
        is answered, or leased to somebody else by now. `of_this_run` and the error are those of `find`."""
        key = self.find(lease, of_this_run=of_this_run)
        if key is None or self.leases.lease_on(key) is not None:
            return False
        self._advance_to(key)
        task = self.leases.task(key)
        task = replace(task, attempt=max(task.attempt, lease.attempt))
        self.leases.lease(LeaseRecord(str(lease), task, producer, 0, deadline))
        return True

    def find(self, lease: LeaseId, *, of_this_run: bool = True) -> Key | None:
        """The prompt that a group with this lease would answer; None if it is answered or a dead letter.
        Raise UnknownLeaseError if no trainer of this run can have given it; if not `of_this_run`, only this process can."""
        key = lease.key
        # A crash may have set the cursor back by an epoch.
        is_possible = (
            key.prompt_id < self.order.num_prompts and lease.attempt >= 1 and key.epoch <= self.order.epoch + 1
        )
        if not is_possible or not (of_this_run or lease.session == self._session):
            raise UnknownLeaseError(str(lease))
        status = self.leases.status(key)
        is_wanted = self.order.is_ahead(key) if status is None else not isinstance(status, Held)
        return key if is_wanted else None

    # Prompts whose group is here

    def mark_answered(self, lease: LeaseId, held: Held) -> PromptTask[Key]:
        """The prompt that `find` named has its group. It is held until it is settled or requeued, also when another group,
        held in between, has moved the cursor past it or withdrawn its return."""
        self._advance_to(lease.key)
        self.leases.end_lease(str(lease))
        task = self.leases.task(lease.key)
        self.leases.put(task, held)
        return task

    def is_held(self, key: Key) -> bool:
        return isinstance(self.leases.status(key), Held)

    def mark_done(self, key: Key) -> Held:
        """The group of the held prompt was trained, or dropped for good. Returns what was known of it."""
        held = self.leases.remove(key)
        assert isinstance(held, Held), f"{key} is settled and was {held}"
        return held

    def requeue(self, key: Key) -> None:
        """The group of the held prompt is unusable through no fault of the prompt (stale): the prompt waits again, unless it
        is leased already, because the group was a late one."""
        self.leases.put(self.leases.task(key), Leased() if self.leases.lease_on(key) else Waiting())

    # Settled prompts

    def defer(self, key: Key, version: int) -> bool:
        """The settled prompt returns when `version` is published. False if it is deferred already, has had that return
        before a crash, or has had its first attempt of a later epoch. When too many are deferred, the oldest are forgotten."""
        returning = key._replace(reroll=key.reroll + 1)
        if returning in self._answered_early:
            self._answered_early.remove(returning)
            return False
        if not self.order.is_ahead(Key(key.epoch + 1, key.prompt_id)) or key.prompt_id in self._returns:
            return False
        while self.num_deferred >= self._max_deferred:
            self._withdraw(self.leases.first(Deferred))
        self._put_off(PromptTask(returning, version))
        return True

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return everything unsettled as plain data; after `restore` it waits."""
        works = [self.leases.task(key) for key in self.leases.keys(Waiting, Leased, Held)]
        self._answered_early = set(filter(self._may_be_deferred, self._answered_early))
        return self.order.state() | {
            "unsettled": [
                [*task.key, task.min_version, task.attempt, task.data_failures, task.infra_failures] for task in works
            ],
            "deferred": [[*key, self.leases.task(key).min_version] for key in self.leases.keys(Deferred)],
            "answered": [list(key) for key in sorted(self._answered_early)],
            "chances": None if self.draws is None else self.draws.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`, in a ledger that was not used yet. Raises as `EpochOrder.restore`."""
        self.order.restore(state)
        if self.draws is not None and state["chances"] is not None:
            self.draws.restore(state["chances"])
        self._answered_early = {Key(*numbers) for numbers in state["answered"]}
        for epoch, prompt_id, reroll, *numbers in state["unsettled"]:
            self.leases.put(PromptTask(Key(epoch, prompt_id, reroll), *numbers), Waiting())
        for *key, version in state["deferred"]:
            self._put_off(PromptTask(Key(*key), version))

    def restore_prompt(self, key: Key, held: Held, *, is_new: bool) -> bool:
        """Restore a prompt from the journal; it is held from now on. Return False if it was settled in the restored
        state, or is held already. One that `is_new` was answered after that state was taken, which therefore cannot have
        settled it."""
        self._advance_to(key)
        if is_new and self.leases.status(key) is None:
            # It was leased before its prompt was in cooldown, or was deferred, which this process learns later.
            self.leases.put(PromptTask(key), Waiting())
            if key.reroll > 0 and self._may_be_deferred(key):
                self._answered_early.add(key)
        if not self.leases.is_open(key):
            return False
        self.leases.put(self.leases.task(key), held)
        return True

    # Underneath

    def _put_off(self, task: PromptTask[Key]) -> None:
        self.leases.put(task, Deferred())
        self._returns[task.key.prompt_id] = task.key

    def _withdraw(self, key: Key) -> None:
        """The deferred prompt does not return."""
        self._returns.pop(key.prompt_id, None)
        self.leases.remove(key)

    def _may_be_deferred(self, key: Key) -> bool:
        """Return whether the attempt that this return would follow is not settled yet."""
        before = key._replace(reroll=key.reroll - 1)
        return self.leases.status(before) is not None or self.order.is_ahead(before)

    def _next_task(self, version: int, full: Collection[str]) -> PromptTask[Key] | None:
        due = self.leases.next_deferred(version) if self._share.allows_one else None
        while due is not None and self._is_closed(due.key.prompt_id):
            self._withdraw(due.key)
            due = self.leases.next_deferred(version)
        if due is not None and self.environment_of(due.key.prompt_id) in full:
            due = None
        task = self._next_with_place(full) if due is None else due
        if task is not None:
            self._share.count_lease(due is not None)
        if due is not None:
            self._withdraw(due.key)
        return task

    def _next_with_place(self, full: Collection[str]) -> PromptTask[Key] | None:
        """The next first attempt of an environment that is not full; those before it wait."""
        while all(self.leases.num_waiting(name) < MOST_PUT_OFF for name in full):
            task = self._next_first_attempt()
            if self.environment_of(task.key.prompt_id) not in full:
                return task
            self.leases.put(task, Waiting())
        return None

    def _next_first_attempt(self, wanted: Key | None = None) -> PromptTask[Key]:
        """The prompt does not return as well."""
        key = self.order.next(wanted)
        self._newest.append(self.environment_of(key.prompt_id))
        self.newest[self._newest[-1]] += 1
        if len(self._newest) > NEWEST:
            self.newest[self._newest.popleft()] -= 1
        if key.prompt_id in self._returns:
            self._withdraw(self._returns[key.prompt_id])
        return PromptTask(key)

    def _advance_to(self, key: Key) -> None:
        """Move the cursor past `key`, or ends its deferral. What the cursor passes waits."""
        if isinstance(self.leases.status(key), Deferred):
            task = self.leases.task(key)
            self._withdraw(key)
            self.leases.put(task, Waiting())
        while self.order.is_ahead(key):
            self.leases.put(self._next_first_attempt(key), Waiting())
