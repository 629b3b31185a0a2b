"""The prompt ledger: which prompt is leased next, who has it, and what becomes of it.

Guarantee: every prompt of an epoch is with one producer at a time and is settled exactly once (trained, dropped or given up).
A lease that ends without a group makes its prompt wait again, and it then goes before all others; the first group to arrive
wins. A settled prompt may be deferred: it returns, once its version is published, under a key of its own. A lease id says
which key it is for, so a lease that an earlier trainer process gave can still be answered.

    first attempt ------> leased --> held --> settled --> deferred
                           |   ^       |                     |
                           v   |       v                     |
                          waiting <----+        leased <-----+

A prompt is one entry of a `PromptTable`, with its status. What is not in the table is ahead in the epoch's order, or settled.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protocol.config.learning import RerollSection
from replay.lease_ids import Key, LeaseId, UnknownLeaseError
from replay.prompts.epoch_order import EpochOrder
from replay.prompts.failure_budgets import FailureClass, RetryBudget
from replay.prompts.leases import Deferred, Held, Leased, LeaseRecord, PromptTable, Waiting, Work
from replay.prompts.rerolls import RerollShare


class PromptLedger:
    """See the module's guarantee. Times are of the caller's clock, in seconds; `session` is unique per trainer process."""

    def __init__(
        self,
        num_prompts: int,
        *,
        seed: int,
        shuffle: bool,
        budgets: Mapping[FailureClass, RetryBudget],
        session: str,
        rerolls: RerollSection,
    ) -> None:
        self.order = EpochOrder(num_prompts, seed, shuffle=shuffle)
        self.leases: PromptTable[Key] = PromptTable(budgets)
        self._session = session
        self._max_deferred = rerolls.max_pending
        self._share = RerollShare(rerolls.max_share)
        self._returns: dict[int, Key] = {}  # of the deferred prompts, by prompt id
        self._answered_early: set[Key] = set()  # returns that had their group before a crash undid their deferral

    @property
    def num_deferred(self) -> int:
        return self.leases.count(Deferred)

    # Leases

    def lease(self, producer: str, *, version: int, policy_floor: int, now: float, deadline: float) -> LeaseRecord[Key]:
        """Leases the next prompt to `producer`: one that waits if one is due, else one that was deferred if it may return, else
        the next first attempt. `version` is the newest policy that is published, `policy_floor` the oldest that may answer."""
        work = self.leases.next_waiting(now, version) or self._next_work(version)
        work = replace(work, attempt=work.attempt + 1)
        lease_id = str(LeaseId(work.key, work.attempt, self._session))
        return self.leases.lease(LeaseRecord(lease_id, work, producer, max(policy_floor, work.min_version), deadline))

    def adopt(self, lease: LeaseId, producer: str, *, deadline: float, of_this_run: bool = True) -> bool:
        """A producer still works on a lease of an earlier trainer process. Returns whether it may go on: not when the prompt
        is answered, or leased to somebody else by now. `of_this_run` and the error are those of `find`."""
        key = self.find(lease, of_this_run=of_this_run)
        if key is None or self.leases.lease_on(key) is not None:
            return False
        self._reach(key)
        work = self.leases.work(key)
        work = replace(work, attempt=max(work.attempt, lease.attempt))
        self.leases.lease(LeaseRecord(str(lease), work, producer, 0, deadline))
        return True

    def find(self, lease: LeaseId, *, of_this_run: bool = True) -> Key | None:
        """The prompt that a group with this lease would answer; None if it is answered or given up. Raises UnknownLeaseError if
        no trainer of this run can have given it; if not `of_this_run`, only this process can."""
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

    def hold(self, lease: LeaseId, held: Held) -> Work[Key]:
        """The prompt that `find` named has its group. It is held until it is settled or requeued, also when another group,
        held in between, has moved the cursor past it or withdrawn its return."""
        self._reach(lease.key)
        self.leases.end_lease(str(lease))
        work = self.leases.work(lease.key)
        self.leases.put(work, held)
        return work

    def is_held(self, key: Key) -> bool:
        return isinstance(self.leases.status(key), Held)

    def settle(self, key: Key) -> Held:
        """The group of the held prompt was trained, or dropped for good. Returns what was known of it."""
        held = self.leases.remove(key)
        assert isinstance(held, Held), f"{key} is settled and was {held}"
        return held

    def requeue(self, key: Key) -> None:
        """The group of the held prompt is unusable through no fault of the prompt (stale): the prompt waits again, unless it
        is leased already, because the group was a late one."""
        self.leases.put(self.leases.work(key), Leased() if self.leases.lease_on(key) else Waiting())

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
        self._put_off(Work(returning, version))
        return True

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Everything unsettled, as plain data; after `restore` it waits."""
        works = [self.leases.work(key) for key in self.leases.keys(Waiting, Leased, Held)]
        self._answered_early = set(filter(self._may_be_deferred, self._answered_early))
        return self.order.state() | {
            "unsettled": [
                [*work.key, work.min_version, work.attempt, work.data_failures, work.infra_failures] for work in works
            ],
            "deferred": [[*key, self.leases.work(key).min_version] for key in self.leases.keys(Deferred)],
            "answered": [list(key) for key in sorted(self._answered_early)],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, in a ledger that was not used yet. Raises as `EpochOrder.restore`."""
        self.order.restore(state)
        self._answered_early = {Key(*numbers) for numbers in state["answered"]}
        for epoch, prompt_id, reroll, *numbers in state["unsettled"]:
            self.leases.put(Work(Key(epoch, prompt_id, reroll), *numbers), Waiting())
        for *key, version in state["deferred"]:
            self._put_off(Work(Key(*key), version))

    def recall(self, key: Key, held: Held, *, is_new: bool) -> bool:
        """The journal says what became of this prompt, which is held from now on. False if it was settled in the restored
        state, or is held already. One that `is_new` was answered after that state was taken, which therefore cannot have
        settled it."""
        self._reach(key)
        if is_new and self.leases.status(key) is None:
            # It was leased before its prompt was in cooldown, or was deferred, which this process learns later.
            self.leases.put(Work(key), Waiting())
            if key.reroll > 0 and self._may_be_deferred(key):
                self._answered_early.add(key)
        if not self.leases.is_open(key):
            return False
        self.leases.put(self.leases.work(key), held)
        return True

    # Underneath

    def _put_off(self, work: Work[Key]) -> None:
        self.leases.put(work, Deferred())
        self._returns[work.key.prompt_id] = work.key

    def _withdraw(self, key: Key) -> None:
        """The deferred prompt does not return."""
        self._returns.pop(key.prompt_id, None)
        self.leases.remove(key)

    def _may_be_deferred(self, key: Key) -> bool:
        """Whether the attempt that this return would follow is not settled yet."""
        before = key._replace(reroll=key.reroll - 1)
        return self.leases.status(before) is not None or self.order.is_ahead(before)

    def _next_work(self, version: int) -> Work[Key]:
        due = self.leases.next_deferred(version) if self._share.allows_one else None
        self._share.count_lease(due is not None)
        if due is None:
            return self._next_first_attempt()
        self._withdraw(due.key)
        return due

    def _next_first_attempt(self, wanted: Key | None = None) -> Work[Key]:
        """The prompt does not return as well."""
        key = self.order.next(wanted)
        if key.prompt_id in self._returns:
            self._withdraw(self._returns[key.prompt_id])
        return Work(key)

    def _reach(self, key: Key) -> None:
        """Moves the cursor past `key`, or ends its deferral. What the cursor passes waits."""
        if isinstance(self.leases.status(key), Deferred):
            work = self.leases.work(key)
            self._withdraw(key)
            self.leases.put(work, Waiting())
        while self.order.is_ahead(key):
            self.leases.put(self._next_first_attempt(key), Waiting())
