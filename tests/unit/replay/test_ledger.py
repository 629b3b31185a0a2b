"""Every prompt of an epoch is leased to one producer at a time and settled once; nothing is lost."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay import ledger as ledger_module
from replay.ledger import LeaseRecord, PromptLedger, UnknownLeaseError, WorkItem

from .builders import ledger

FAR = 1e9


def lease(book: PromptLedger, producer: str = "p", deadline: float = FAR) -> LeaseRecord:
    return book.lease(producer, policy_floor=0, deadline=deadline)


def prompts_of(book: PromptLedger, count: int) -> list[int]:
    return [lease(book).item.prompt_id for _ in range(count)]


# The order.


@pytest.mark.parametrize("num_prompts", [1, 2, 7, 100])
def test_every_epoch_is_a_permutation_and_another_one(num_prompts: int) -> None:
    order = prompts_of(ledger(num_prompts, seed=3, shuffle=True), 3 * num_prompts)
    epochs = [order[i * num_prompts : (i + 1) * num_prompts] for i in range(3)]
    assert all(sorted(epoch) == list(range(num_prompts)) for epoch in epochs)
    if num_prompts == 100:
        assert epochs[0] != epochs[1] != epochs[2] != list(range(100))


def test_the_order_is_a_function_of_the_seed() -> None:
    first, same, other = (prompts_of(ledger(50, seed=seed, shuffle=True), 100) for seed in (7, 7, 8))
    assert first == same
    assert first != other


def test_without_shuffle_the_dataset_keeps_its_order_and_epochs_roll_over() -> None:
    book = ledger(3)
    keys = [lease(book).item.key for _ in range(7)]
    assert keys == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert book.epoch == 2
    assert book.num_leased == 7


def test_no_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        ledger(0)


# The life of a lease.


def test_a_lease_names_its_session_prompt_producer_floor_and_deadline() -> None:
    record = ledger(session="ab12").lease("gpu-0", policy_floor=4, deadline=60.0)
    assert record == LeaseRecord("ab12-1", WorkItem(0, 0, attempt=1), "gpu-0", 4, 60.0)


def test_a_result_is_held_until_it_is_settled() -> None:
    book = ledger()
    record = lease(book)
    item = book.complete(record.lease_id)
    assert item == record.item
    assert book.num_leased == 0
    assert book.state()["unsettled"] == [[0, 0, 1, 0]]
    book.settle(item.key)
    assert book.state()["unsettled"] == []


def test_an_expired_lease_goes_out_again_before_any_fresh_prompt() -> None:
    book = ledger()
    late, fine = lease(book, deadline=10.0), lease(book, deadline=20.0)
    assert book.expire(9.9) == []
    assert book.expire(10.0) == [late]
    assert book.expire(10.0) == []
    assert lease(book).item == WorkItem(0, 0, attempt=2)
    assert lease(book).item == WorkItem(0, 2, attempt=1)
    assert fine.item.prompt_id == 1


def test_the_late_result_of_an_expired_lease_wins_if_it_is_the_first() -> None:
    book = ledger()
    first = lease(book, deadline=1.0)
    book.expire(1.0)
    second = lease(book)
    assert second.item.key == first.item.key
    assert book.complete(first.lease_id) == second.item  # the item knows of both attempts
    assert book.complete(second.lease_id) is None
    assert book.num_leased == 0


def test_the_late_result_of_an_expired_lease_loses_if_it_is_the_second() -> None:
    book = ledger()
    first = lease(book, deadline=1.0)
    book.expire(1.0)
    second = lease(book)
    assert book.complete(second.lease_id) == second.item
    assert book.complete(first.lease_id) is None


def test_a_late_result_that_comes_before_the_second_lease_takes_the_prompt_back_from_the_queue() -> None:
    book = ledger()
    first = lease(book, deadline=1.0)
    book.expire(1.0)
    assert book.complete(first.lease_id) == first.item
    assert lease(book).item.prompt_id == 1


def test_a_result_that_is_sent_again_is_a_duplicate_whatever_became_of_the_first() -> None:
    book = ledger()
    held, settled, stale = (lease(book) for _ in range(3))
    for record in (held, settled, stale):
        assert book.complete(record.lease_id) is not None
    book.settle(settled.item.key)
    book.requeue(stale.item.key)
    for record in (held, settled, stale):
        assert book.complete(record.lease_id) is None
        assert book.fail(record.lease_id) is None
    assert lease(book).item == WorkItem(0, 2, attempt=2)


def test_a_failed_prompt_goes_out_again_until_max_attempts() -> None:
    book = ledger(2, max_attempts=3)
    answers = [book.fail(lease(book).lease_id) for _ in range(3)]
    assert answers == [True, True, False]
    assert book.state()["unsettled"] == []
    assert [lease(book).item.key for _ in range(2)] == [(0, 1), (1, 0)]


def test_a_permanent_failure_is_skipped_at_once_for_this_epoch() -> None:
    book = ledger(1)
    assert book.fail(lease(book).lease_id, permanent=True) is False
    assert lease(book).item == WorkItem(1, 0, attempt=1)


def test_a_late_failure_is_moot() -> None:
    book = ledger(max_attempts=1)
    waiting, leased_again, answered = (lease(book, deadline=1.0) for _ in range(3))
    book.expire(1.0)
    assert book.fail(waiting.lease_id) is None  # it goes out again anyway
    second = [lease(book) for _ in range(3)]
    assert second[0].item == WorkItem(0, 0, attempt=2)
    assert book.fail(leased_again.lease_id) is None
    assert book.complete(second[2].lease_id) is not None
    assert book.fail(answered.lease_id) is None


def test_a_lease_given_back_goes_out_again_and_counts_no_failure() -> None:
    book = ledger(max_attempts=1)
    record = lease(book)
    book.give_back(record.lease_id)
    book.give_back(record.lease_id)
    assert book.num_leased == 0
    assert lease(book).item == WorkItem(0, 0, attempt=2, failures=0)
    assert lease(book).item.prompt_id == 1


def test_a_producer_that_leaves_loses_what_it_does_not_keep() -> None:
    book = ledger(10)
    mine = [lease(book, "leaves") for _ in range(3)]
    lease(book, "stays")
    assert book.release("leaves", keep=frozenset([mine[1].lease_id, "of-another-session"])) == [mine[0], mine[2]]
    assert book.num_leased == 2
    assert [lease(book).item.prompt_id for _ in range(3)] == [0, 2, 4]
    assert book.complete(mine[1].lease_id) == mine[1].item


def test_a_stale_group_sends_its_prompt_out_again() -> None:
    book = ledger()
    record = lease(book)
    book.complete(record.lease_id)
    book.requeue(record.item.key)
    assert lease(book).item == WorkItem(0, 0, attempt=2)


def test_a_stale_late_result_does_not_send_out_a_prompt_that_is_out_already() -> None:
    book = ledger()
    first = lease(book, deadline=1.0)
    book.expire(1.0)
    second = lease(book)
    book.complete(first.lease_id)
    book.requeue(first.item.key)  # too old; `second` is still being generated, by a newer policy
    assert lease(book).item.prompt_id == 1
    assert book.complete(second.lease_id) == second.item


def test_an_unknown_lease_is_told_apart() -> None:
    book = ledger()
    for answer in (book.complete, book.fail, book.give_back):
        with pytest.raises(UnknownLeaseError):
            answer("other-1")


def test_ended_leases_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_REMEMBERED_LEASES", 2)
    book = ledger(10)
    records = [lease(book) for _ in range(3)]
    for record in records:
        book.complete(record.lease_id)
    with pytest.raises(UnknownLeaseError):
        book.complete(records[0].lease_id)
    assert book.complete(records[1].lease_id) is None


# Checkpoints.


def test_restore_brings_back_exactly_the_unsettled_ones() -> None:
    book = ledger(5, seed=1, shuffle=True, max_attempts=3)
    trained, out, ready, failed = (lease(book) for _ in range(4))
    book.complete(trained.lease_id)
    book.settle(trained.item.key)
    book.complete(ready.lease_id)
    book.fail(failed.lease_id)

    restored = ledger(5, seed=1, shuffle=True, max_attempts=3, session="t")
    restored.restore(book.state())
    assert restored.num_leased == 0
    again = [lease(restored) for _ in range(3)]
    assert {record.item for record in again} == {
        WorkItem(0, out.item.prompt_id, attempt=2),
        WorkItem(0, ready.item.prompt_id, attempt=2),
        WorkItem(0, failed.item.prompt_id, attempt=2, failures=1),
    }
    fresh = [lease(restored).item.key for _ in range(6)]
    assert fresh == [lease(book).item.key for _ in range(7)][1:]  # `failed` goes out again first in the old one
    with pytest.raises(UnknownLeaseError):
        restored.complete(out.lease_id)


def test_restore_refuses_a_dataset_of_another_size() -> None:
    with pytest.raises(ValueError, match="the dataset has 5 prompts now and had 4 at the checkpoint"):
        ledger(5).restore(ledger(4).state())


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, against a model that only keeps sets."""

    @initialize(num_prompts=st.integers(1, 3), max_attempts=st.integers(1, 3), shuffle=st.booleans())
    def start(self, num_prompts: int, max_attempts: int, shuffle: bool) -> None:
        self.arguments: dict[str, Any] = {"seed": 5, "shuffle": shuffle, "max_attempts": max_attempts}
        self.num_prompts = num_prompts
        self.sessions = 0
        self.book = self.new_book()
        reference = ledger(num_prompts, **self.arguments)
        self.fresh = iter([lease(reference).item.key for _ in range(400)])  # what must come, in this order
        self.live: dict[str, LeaseRecord] = {}
        self.taken_back: dict[str, LeaseRecord] = {}
        self.answered: set[str] = set()
        self.waiting: set[tuple[int, int]] = set()  # go out again
        self.held: set[tuple[int, int]] = set()
        self.failures: Counter[tuple[int, int]] = Counter()
        self.settled: Counter[tuple[int, int]] = Counter()
        self.seen: set[tuple[int, int]] = set()
        self.now = 0.0

    def new_book(self) -> PromptLedger:
        self.sessions += 1
        return ledger(self.num_prompts, session=f"s{self.sessions}", **self.arguments)

    def is_out(self, key: tuple[int, int]) -> bool:
        return any(record.item.key == key for record in self.live.values())

    def sends_out_again(self, key: tuple[int, int]) -> None:
        if key not in self.held and not self.settled[key] and not self.is_out(key):
            self.waiting.add(key)

    def any_lease(self, data: st.DataObject) -> LeaseRecord:
        """A late one whenever there is one: those are the interesting ones."""
        place = self.taken_back or self.live
        return place[data.draw(st.sampled_from(sorted(place)))]

    @rule(producer=st.sampled_from("ab"), patience=st.integers(1, 4), count=st.integers(1, 3))
    def leases(self, producer: str, patience: int, count: int) -> None:
        for _ in range(count):
            self.lease(producer, patience)

    def lease(self, producer: str, patience: int) -> None:
        record = self.book.lease(producer, policy_floor=0, deadline=self.now + patience)
        key = record.item.key
        if self.waiting:
            assert key in self.waiting
            self.waiting.remove(key)
        else:
            assert key == next(self.fresh)
            assert key not in self.seen
        self.seen.add(key)
        assert not self.is_out(key), "leased twice at once"
        assert key not in self.held
        assert not self.settled[key]
        assert record.item.failures == self.failures[key]
        self.live[record.lease_id] = record

    def end(self, record: LeaseRecord) -> None:
        self.live.pop(record.lease_id, None)
        self.taken_back.pop(record.lease_id, None)
        self.answered.add(record.lease_id)

    @precondition(lambda self: self.live or self.taken_back)
    @rule(data=st.data(), stale=st.booleans())
    def result(self, data: st.DataObject, stale: bool) -> None:
        record = self.any_lease(data)
        item = self.book.complete(record.lease_id)
        key = record.item.key
        self.end(record)
        assert (item is not None) == (key not in self.held and not self.settled[key])
        if item is not None:
            assert item.key == key
            self.waiting.discard(key)
            if stale:
                self.book.requeue(key)
                self.sends_out_again(key)
            else:
                self.held.add(key)

    @precondition(lambda self: self.live or self.taken_back)
    @rule(data=st.data(), permanent=st.booleans())
    def failure(self, data: st.DataObject, permanent: bool) -> None:
        record = self.any_lease(data)
        key = record.item.key
        self.end(record)
        moot = key in self.held or self.settled[key] or key in self.waiting or self.is_out(key)
        again = self.book.fail(record.lease_id, permanent=permanent)
        if moot:
            assert again is None
            return
        self.failures[key] += 1
        assert again == (not permanent and self.failures[key] < self.arguments["max_attempts"])
        if again:
            self.waiting.add(key)
        else:
            self.settled[key] += 1

    @precondition(lambda self: self.live or self.taken_back)
    @rule(data=st.data())
    def given_back(self, data: st.DataObject) -> None:
        record = self.any_lease(data)
        self.book.give_back(record.lease_id)
        self.end(record)
        self.sends_out_again(record.item.key)

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def an_answer_comes_again(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.answered)))
        assert self.book.complete(lease_id) is None
        assert self.book.fail(lease_id) is None

    def taken(self, records: list[LeaseRecord], expected: set[str]) -> None:
        assert {record.lease_id for record in records} == expected
        for lease_id in expected:
            self.taken_back[lease_id] = self.live.pop(lease_id)
        for lease_id in expected:
            self.sends_out_again(self.taken_back[lease_id].item.key)

    @precondition(lambda self: self.live)
    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = {lease_id for lease_id, record in self.live.items() if record.deadline <= self.now}
        self.taken(self.book.expire(self.now), due)

    @rule(producer=st.sampled_from("ab"), keep=st.booleans())
    def producer_leaves(self, producer: str, keep: bool) -> None:
        mine = {lease_id for lease_id, record in self.live.items() if record.producer == producer}
        kept = frozenset(list(mine)[:1] if keep else [])
        self.taken(self.book.release(producer, kept), mine - kept)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), trained=st.booleans())
    def group_leaves_the_table(self, data: st.DataObject, trained: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(key)
        if trained:
            self.book.settle(key)
            self.settled[key] += 1
        else:
            self.book.requeue(key)
            self.sends_out_again(key)

    @rule()
    def trainer_restarts(self) -> None:
        state = self.book.state()
        self.book = self.new_book()
        self.book.restore(state)
        self.waiting |= self.held | {record.item.key for record in self.live.values() if self.unsettled(record)}
        self.held.clear()
        self.live.clear()
        self.taken_back.clear()
        self.answered.clear()

    def unsettled(self, record: LeaseRecord) -> bool:
        return not self.settled[record.item.key]

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "book"):
            return
        assert self.book.num_leased == len(self.live)
        out = {record.item.key for record in self.live.values() if self.unsettled(record)}
        settled = {key for key, count in self.settled.items() if count}
        assert self.seen == out | self.waiting | self.held | settled
        assert not settled & (self.waiting | self.held)
        assert all(count <= 1 for count in self.settled.values())
        assert {(epoch, prompt) for epoch, prompt, _, _ in self.book.state()["unsettled"]} == self.seen - settled


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLedgerMachine = LedgerMachine.TestCase
