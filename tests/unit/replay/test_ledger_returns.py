"""A settled prompt may return under a key of its own, or sit out; a crash neither loses nor doubles that."""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from replay.lease_ids import Key, LeaseId
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import Deferred, LeaseRecord, PromptTask, Waiting
from tests.unit.replay.books import FAR, adopt, answer, find, hold, prompts_of, recall
from tests.unit.replay.builders import ledger


def book_of(num_prompts: int = 4, **changes: Any) -> PromptLedger:
    """Any number of returns may follow the first lease."""
    return ledger(num_prompts, **({"max_share": 1.0} | changes))


def lease(book: PromptLedger, version: int = 0, policy_floor: int = 0) -> LeaseRecord:
    record = book.lease("p", version=version, policy_floor=policy_floor, now=0.0, deadline=FAR)
    assert record is not None
    return record


def settle(book: PromptLedger, record: LeaseRecord) -> Key:
    assert answer(book, record.lease_id) is not None
    book.mark_done(record.task.key)
    return record.task.key


def keys(book: PromptLedger, count: int, version: int = 0) -> list[Key]:
    return [lease(book, version).task.key for _ in range(count)]


def restored(book: PromptLedger, num_prompts: int = 4, **changes: Any) -> PromptLedger:
    result = book_of(num_prompts, session="t", **changes)
    result.restore(json.loads(json.dumps(book.state())))
    assert result.state() == book.state()
    return result


def key_of(lease_id: str) -> Key:
    return LeaseId.parse(lease_id).key


# Returns.


def test_a_deferred_prompt_is_leased_again_once_its_version_is_published_and_before_fresh_ones() -> None:
    book = book_of()
    assert book.defer(settle(book, lease(book)), 3)
    assert book.num_deferred == 1
    assert lease(book, version=2).task.key == (0, 1, 0)
    record = lease(book, version=3, policy_floor=1)
    assert record.task == PromptTask((0, 0, 1), min_version=3, attempt=1)
    assert (record.lease_id, record.policy_floor, book.num_deferred) == ("0-0-1-1-s", 3, 0)
    assert lease(book, version=5, policy_floor=4).policy_floor == 4


def test_what_goes_out_again_goes_before_what_returns() -> None:
    book = book_of()
    failed, given_back = lease(book), lease(book)
    book.defer(settle(book, failed), 0)
    book.leases.give_back(given_back.lease_id)
    assert keys(book, 3) == [(0, 1, 0), (0, 0, 1), (0, 2, 0)]


def test_a_return_has_a_life_of_its_own_and_may_itself_be_deferred() -> None:
    book = book_of(data_attempts=2)
    first = lease(book)
    book.leases.fail(first.lease_id, "reward_failed", -9.0)
    book.defer(settle(book, lease(book)), 0)
    second = lease(book)
    assert second.task == PromptTask((0, 0, 1), attempt=1), "its failures before do not count"
    assert find(book, second.lease_id) == (0, 0, 1)
    assert find(book, first.lease_id) is None
    assert book.defer(settle(book, second), 0)
    assert lease(book).task.key == (0, 0, 2)


def test_a_return_that_ends_without_a_group_goes_out_again_and_not_below_its_version() -> None:
    book = book_of()
    book.defer(settle(book, lease(book)), 3)
    assert book.leases.fail(lease(book, version=3).lease_id, "released", -9.0) is True
    again = restored(book)
    assert keys(again, 1, version=2) == [(0, 1, 0)], "this process is set back before the version that it waits for"
    assert lease(again, version=3).task == PromptTask((0, 0, 1), min_version=3, attempt=2, infra_failures=1)


def test_a_prompt_whose_later_first_attempt_has_come_does_not_return() -> None:
    book = book_of(1)
    first, second = lease(book), lease(book)
    assert second.task.key == (1, 0, 0)
    assert book.defer(settle(book, first), 0) is False
    assert book.defer(settle(book, second), 0) is True
    assert keys(book, 1) == [(1, 0, 1)]


def test_a_waiting_return_is_withdrawn_when_the_prompt_has_its_next_first_attempt() -> None:
    book = book_of(1)
    book.defer(settle(book, lease(book)), 9)
    assert keys(book, 1) == [(1, 0, 0)]
    assert (book.num_deferred, find(book, "0-0-1-1-s")) == (0, None)


def test_of_deferred_prompts_those_that_wait_longest_return_first_and_not_before_their_version() -> None:
    book = book_of(8, max_share=1.0, max_pending=3)
    for record, version in zip([lease(book) for _ in range(4)], (4, 5, 4, 4), strict=True):
        assert book.defer(settle(book, record), version)
    assert book.state()["deferred"] == [[0, 1, 1, 5], [0, 2, 1, 4], [0, 3, 1, 4]], "of too many the first gives way"
    assert keys(book, 1, version=3) == [(0, 4, 0)]
    assert keys(book, 3, version=4) == [(0, 2, 1), (0, 3, 1), (0, 5, 0)]
    assert keys(book, 1, version=5) == [(0, 1, 1)]


def test_a_deferred_prompt_is_not_deferred_again() -> None:
    book = book_of()
    key = settle(book, lease(book))
    assert [book.defer(key, version) for version in (3, 9)] == [True, False]
    assert book.state()["deferred"] == [[0, 0, 1, 3]]


def test_returns_keep_to_their_share() -> None:
    book = ledger(100, max_share=0.25, max_pending=50)
    for record in [lease(book) for _ in range(12)]:
        book.defer(settle(book, record), 1)
    assert [key[2] for key in keys(book, 16, version=1)] == [1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]


# Leases of other processes.


def test_a_return_leased_by_the_process_before_is_adopted_or_answered_and_not_twice() -> None:
    book = book_of()
    for record in [lease(book), lease(book)]:
        book.defer(settle(book, record), 2)
    after = restored(book)
    assert adopt(after, "0-0-1-3-s", "gpu-7", deadline=9.0)
    assert after.leases.leases_of("gpu-7")[0].task == PromptTask((0, 0, 1), min_version=2, attempt=3)
    assert not adopt(after, "0-0-1-2-s", "gpu-8", deadline=9.0), "it is out"
    assert answer(after, "0-1-1-1-s") == PromptTask((0, 1, 1), min_version=2)
    assert answer(after, "0-1-1-1-t") is None, "answered"
    assert find(after, "0-2-1-1-s") is None, "never deferred"
    assert not adopt(after, "0-2-1-1-s", "p", deadline=9.0)
    assert after.num_deferred == 0
    assert keys(after, 2, version=9) == [(0, 2, 0), (0, 3, 0)]


def test_a_return_in_the_journal_whose_deferral_the_checkpoint_does_not_know_is_held_and_not_deferred_again() -> None:
    before = book_of().state()
    after = book_of(session="t")
    after.restore(before)
    assert recall(after, (0, 0, 0), is_new=True), "its group is in a batch that will be cut again"
    assert recall(after, (0, 0, 1), is_new=True)
    assert after.state()["answered"] == [[0, 0, 1]]
    after.mark_done((0, 0, 1))
    again = restored(after)
    assert recall(again, (0, 0, 0), is_new=False)
    again.mark_done((0, 0, 0))
    assert again.defer(Key(0, 0, 0), 0) is False
    assert again.num_deferred == 0
    assert again.state()["answered"] == []


def test_of_answered_returns_only_those_are_remembered_that_could_be_deferred_again() -> None:
    book = book_of()
    settle(book, lease(book))
    assert recall(book, (0, 0, 1), is_new=True)
    assert not book._answered_early
    assert book.state()["answered"] == []


def test_an_answered_return_whose_attempt_before_is_not_deferred_after_all_is_forgotten() -> None:
    book = book_of()
    assert recall(book, (0, 0, 0), is_new=True)
    assert recall(book, (0, 0, 1), is_new=True)
    book.mark_done(Key(0, 0, 0))  # another group of it, which was not failed
    assert book.state()["answered"] == []
    assert not book._answered_early


@pytest.mark.parametrize("earlier", ["1-0-0-1-s", "1-1-0-1-s"])
def test_groups_that_arrive_together_are_all_held_although_the_first_passes_over_the_second(earlier: str) -> None:
    """The first withdraws the return of prompt 0, or passes over the first attempt at prompt 0, which is in cooldown."""
    book = book_of(2, shuffle=False)
    (first, second) = (lease(book), lease(book))
    settle(book, second)
    key = settle(book, first)
    if earlier == "1-0-0-1-s":
        book.defer(key, 0)
        late = "0-0-1-1-s"
    else:
        book.order.cool_down(0, 1)
        late = "1-0-0-1-s"
    assert find(book, earlier) == key_of(earlier), "both are wanted when they are judged"
    assert find(book, late) == key_of(late)
    hold(book, earlier)
    assert hold(book, late).key == key_of(late)
    assert book.is_held(key_of(late))
    book.requeue(key_of(late))


# Cooldown.


@pytest.mark.parametrize("until_epoch", [1, 2])
def test_a_prompt_sits_out_for_exactly_so_many_epochs(until_epoch: int) -> None:
    book = book_of(3)
    settle(book, lease(book))
    book.order.cool_down(0, until_epoch)
    epochs: dict[int, list[int]] = {}
    for epoch, prompt_id, _ in keys(book, 10):
        epochs.setdefault(epoch, []).append(prompt_id)
    assert all(epochs[epoch] == [1, 2] for epoch in range(until_epoch + 1))
    assert epochs[until_epoch + 1] == [0, 1, 2]


def test_when_all_sit_out_all_come_back() -> None:
    book = book_of(3)
    for prompt_id in prompts_of(book, 3):
        book.order.cool_down(prompt_id, 7)
    assert keys(book, 4) == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 0)]


def test_a_shorter_cooldown_does_not_end_a_longer_one() -> None:
    book = book_of(2)
    prompts_of(book, 2)
    book.order.cool_down(0, 2)
    book.order.cool_down(0, 1)
    assert keys(book, 4) == [(1, 1, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0)]


def test_a_cooldown_survives_a_checkpoint_in_the_middle_of_an_epoch_in_which_all_came_into_it() -> None:
    """They come back with the next epoch, not with the checkpoint."""
    book = book_of(2, shuffle=False)
    for key in [settle(book, record) for record in (lease(book), lease(book))]:
        assert key[0] == 0
    book.order.cool_down(1, 2)
    assert keys(book, 1) == [(1, 0, 0)]
    book.order.cool_down(0, 3)
    after = restored(book, 2)
    assert after.state()["resting"] == [[1, 2], [0, 3]]
    assert keys(after, 1) == [(1, 0, 0)], "unsettled, so it goes out again"
    assert keys(after, 2) == keys(book, 2) == [(2, 0, 0), (2, 1, 0)]


def test_a_prompt_in_cooldown_that_had_been_leased_before_is_held_when_the_journal_has_its_group() -> None:
    book = book_of(2, shuffle=False)
    for record in (lease(book), lease(book)):
        settle(book, record)
    book.order.cool_down(0, 1)
    assert recall(book, (1, 1, 0), is_new=True), "the cursor passes over prompt 0"
    assert find(book, "1-0-0-1-s") is None
    assert recall(book, (1, 0, 0), is_new=False) is False
    assert recall(book, (1, 0, 0), is_new=True), "it had been leased before it was in cooldown"
    assert book.is_held((1, 0, 0))


# What it costs.


def num_steps(action: Callable[[], object]) -> int:
    """The bytecode instructions that Python runs for it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("status", [Deferred(), Waiting(100.0)], ids=["deferred", "in backoff"])
def test_what_a_lease_and_a_deferral_cost_does_not_grow_with_the_prompts_that_are_not_due(
    status: Deferred | Waiting,
) -> None:
    def cost(num_prompts: int) -> int:
        book = book_of(10_000, max_pending=5_000)
        for prompt_id in range(num_prompts):
            if isinstance(status, Deferred):
                assert book.defer(Key(0, 5_000 + prompt_id), 100)
            else:
                book.leases.put(PromptTask(Key(0, 5_000 + prompt_id)), status)
        record = lease(book)
        return num_steps(lambda: (lease(book), book.defer(settle(book, record), 50)))

    assert cost(4_000) < 1.5 * cost(10)
