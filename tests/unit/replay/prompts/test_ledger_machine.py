"""The ledger through any order of events, against a model of sets: nothing is lost, and nothing settled twice."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay.lease_ids import Key
from replay.prompts.leases import LeaseRecord
from replay.prompts.ledger import PromptLedger
from tests.unit.replay.books import adopt, answer, lease
from tests.unit.replay.builders import ledger


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, against a model that only keeps sets."""

    @initialize(num_prompts=st.integers(1, 3), attempts=st.integers(1, 3), shuffle=st.booleans())
    def start(self, num_prompts: int, attempts: int, shuffle: bool) -> None:
        self.arguments: dict[str, Any] = {
            "seed": 5, "shuffle": shuffle, "data_attempts": attempts, "infra_attempts": attempts + 1,
        }  # fmt: skip
        self.num_prompts = num_prompts
        self.sessions = 0
        self.book = self.new_book()
        reference = ledger(num_prompts, **self.arguments)
        self.fresh = iter([lease(reference).work.key for _ in range(400)])  # what must come, in this order
        self.live: dict[str, LeaseRecord] = {}
        self.ended: dict[str, LeaseRecord] = {}
        self.waiting: dict[Key, float] = {}  # goes out again, not before when
        self.held: set[Key] = set()
        self.failures: Counter[tuple[Key, str]] = Counter()
        self.settled: Counter[Key] = Counter()
        self.seen: set[Key] = set()
        self.now = 0.0

    def new_book(self) -> PromptLedger:
        self.sessions += 1
        return ledger(self.num_prompts, session=f"s{self.sessions}", **self.arguments)

    def is_out(self, key: Key) -> bool:
        return any(record.work.key == key for record in self.live.values())

    def is_open(self, key: Key) -> bool:
        return key not in self.held and not self.settled[key]

    def any_lease(self, data: st.DataObject) -> LeaseRecord:
        """A late one whenever there is one: those are the interesting ones."""
        place = self.ended or self.live
        return place[data.draw(st.sampled_from(sorted(place)))]

    @rule(producer=st.sampled_from("ab"), patience=st.integers(1, 4), count=st.integers(1, 3))
    def leases(self, producer: str, patience: int, count: int) -> None:
        for _ in range(count):
            record = lease(self.book, producer, now=self.now, deadline=self.now + patience)
            key = record.work.key
            if any(not_before <= self.now for not_before in self.waiting.values()):
                assert self.waiting.pop(key) <= self.now
            else:
                assert key == next(self.fresh)
                assert key not in self.seen
            self.seen.add(key)
            assert not self.is_out(key), "leased twice at once"
            assert self.is_open(key)
            assert record.work.data_failures == self.failures[key, "data"]
            assert record.work.infra_failures == self.failures[key, "infra"]
            assert record.lease_id not in self.live
            assert record.lease_id not in self.ended
            self.live[record.lease_id] = record

    def end(self, record: LeaseRecord) -> bool:
        """Whether it was alive."""
        was_live = self.live.pop(record.lease_id, None) is not None
        self.ended[record.lease_id] = record
        return was_live

    @precondition(lambda self: self.live or self.ended)
    @rule(data=st.data(), stale=st.booleans())
    def group_arrives(self, data: st.DataObject, stale: bool) -> None:
        record = self.any_lease(data)
        key = record.work.key
        item = answer(self.book, record.lease_id)
        assert (item is not None) == self.is_open(key)
        if item is None:
            return
        assert item.key == key
        self.end(record)
        self.waiting.pop(key, None)
        self.held.add(key)
        if stale:
            self.group_leaves(key, trained=False)

    def fails(self, record: LeaseRecord, reason: str) -> None:
        key, of = record.work.key, "data" if reason in ("reward_failed", "bad_prompt") else "infra"
        counts = self.end(record) and self.is_open(key)
        spent = self.book.leases.spent_by(record.lease_id, reason)
        again = self.book.leases.fail(record.lease_id, reason, self.now)
        assert (again is not None) == counts
        if not counts:
            assert spent is None
            return
        self.failures[key, of] += 1
        failures = self.failures[key, of]
        assert again == (reason != "bad_prompt" and failures < self.arguments[f"{of}_attempts"])
        assert (spent is None) == again
        if again:
            self.waiting[key] = self.now + {"data": 1.0, "infra": 0.25}[of] * 2 ** (failures - 1)
        else:
            self.settled[key] += 1

    @precondition(lambda self: self.live or self.ended)
    @rule(data=st.data(), reason=st.sampled_from(["reward_failed", "generation_failed", "bad_prompt"]))
    def failure(self, data: st.DataObject, reason: str) -> None:
        self.fails(self.any_lease(data), reason)

    @precondition(lambda self: self.live or self.ended)
    @rule(data=st.data())
    def given_back(self, data: st.DataObject) -> None:
        record = self.any_lease(data)
        self.book.leases.give_back(record.lease_id)
        if self.end(record) and self.is_open(record.work.key):
            self.waiting[record.work.key] = 0.0

    @precondition(lambda self: self.live)
    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = {lease_id for lease_id, record in self.live.items() if record.deadline <= self.now}
        overdue = self.book.leases.overdue(self.now)
        assert {record.lease_id for record in overdue} == due
        for record in overdue:
            self.fails(record, "expired")

    @rule(producer=st.sampled_from("ab"))
    def producer_leaves(self, producer: str) -> None:
        mine = self.book.leases.leases_of(producer)
        assert {r.lease_id for r in mine} == {i for i, r in self.live.items() if r.producer == producer}
        for record in mine:
            self.fails(record, "released")

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def is_adopted(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.ended)))
        record = self.ended[lease_id]
        key = record.work.key
        wanted = self.is_open(key) and not self.is_out(key)
        assert adopt(self.book, lease_id, record.producer, deadline=self.now + 2) is wanted
        if wanted:
            self.waiting.pop(key)
            (adopted,) = (r for r in self.book.leases.leases_of(record.producer) if r.lease_id == lease_id)
            self.live[lease_id] = adopted
            del self.ended[lease_id]

    def group_leaves(self, key: Key, *, trained: bool) -> None:
        self.held.remove(key)
        if trained:
            self.book.settle(key)
            self.settled[key] += 1
        else:
            self.book.requeue(key)
            if not self.is_out(key):
                self.waiting[key] = 0.0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), trained=st.booleans())
    def group_leaves_the_table(self, data: st.DataObject, trained: bool) -> None:
        self.group_leaves(data.draw(st.sampled_from(sorted(self.held))), trained=trained)

    @rule()
    def trainer_restarts(self) -> None:
        state = self.book.state()
        self.book = self.new_book()
        self.book.restore(state)
        self.ended |= self.live
        self.waiting = dict.fromkeys([k for k in self.seen if not self.settled[k]], 0.0)
        self.live, self.held = {}, set()

    @invariant()
    def nothing_is_lost_and_nothing_settled_twice(self) -> None:
        if not hasattr(self, "book"):
            return
        assert all(count <= 1 for count in self.settled.values())
        assert self.book.leases.num_leases == len(self.live)
        state = self.book.state()
        unsettled = [tuple(values[:3]) for values in state["unsettled"]]
        assert len(unsettled) == len(set(unsettled))
        assert state["epoch"] * self.num_prompts + state["position"] == len(self.seen)
        assert set(unsettled) == {key for key in self.seen if not self.settled[key]}


LedgerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=60)
TestLedgerMachine = pytest.mark.long(LedgerMachine.TestCase)
