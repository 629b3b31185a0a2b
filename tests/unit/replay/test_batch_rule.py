"""Cuts of batches by hand, and what follows from them for leases, in any order of answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.batch_rule import BatchRule
from replay.buffer import RolloutBuffer
from replay.journal.writer import Journal
from tests.unit.replay.builders import buffer, cut, lease, names, offer, resumed


@pytest.mark.parametrize(
    ("size", "least_signal", "most_answers"),
    [(1, 1, 2), (2, 2, 4), (3, 2, 6), (8, 2, 16), (9, 3, 18), (16, 4, 32), (32, 8, 64)],
)
def test_bounds_of_a_sampled_batch(size: int, least_signal: int, most_answers: int) -> None:
    assert BatchRule.sampled(size) == BatchRule(size, least_signal, most_answers)
    assert BatchRule.full(size) == BatchRule(size, size, math.inf)


@pytest.mark.parametrize(
    ("signals", "num_answers", "last"),
    [
        ([1, 2, 3], 7, None),  # not yet 8 answers
        ([1, 2, 3], 8, 8),
        ([1, 2, 3], 11, 8),
        ([1, 2, 3, 9], 20, 8),  # the ninth answer is for the next batch
        (list(range(1, 17)), 16, 8),
        ([8], 8, None),  # one of two that are needed
        ([8, 9], 9, 9),
        ([3, 12], 12, 12),
        ([3], 15, None),
        ([3], 16, 16),  # one will do after twice as many
        ([3, 17], 17, 16),
        ([], 40, None),
        ([41], 41, 41),
        ([41, 42], 42, 41),
    ],
)
def test_the_end_of_a_sampled_batch_of_8_by_hand(signals: list[int], num_answers: int, last: int | None) -> None:
    assert BatchRule.sampled(8).last_answer(signals, num_answers) == last


@pytest.mark.parametrize(
    ("signals", "num_answers", "taken"),
    [
        ([], 0, 0),
        ([1], 1, 1),
        ([1, 2], 7, 7),  # one more is certainly in the batch
        ([], 7, 6),  # two with signal are missing, which may be the next two
        ([], 8, 6),
        ([8], 8, 7),
        ([], 14, 6),
        ([], 15, 7),  # the next one, if it has signal, ends the batch
        ([], 99, 7),
        ([3], 15, 7),
        ([1, 2], 8, 8),  # a batch is due
        ([1, 2, 9], 9, 9),
        ([1, 2, 9, 10], 24, 16 + 6),  # two are due, and 8 answers without signal behind them
    ],
)
def test_places_that_are_taken_by_hand(signals: list[int], num_answers: int, taken: int) -> None:
    assert BatchRule.sampled(8).num_taken(signals, num_answers) == taken


@pytest.mark.parametrize(("num_signals", "taken"), [(0, 0), (3, 3), (4, 4), (9, 9)])
def test_of_full_batches_each_group_with_signal_takes_a_place(num_signals: int, taken: int) -> None:
    assert BatchRule.full(4).num_taken(list(range(1, num_signals + 1)), 20) == taken


@given(
    size=st.integers(1, 12),
    answers=st.lists(st.booleans(), max_size=100),
    is_sampled=st.booleans(),
    more=st.lists(st.booleans(), max_size=12),
)
def test_groups_that_are_let_out_are_in_the_batches_for_which_they_are_counted(
    size: int, answers: list[bool], is_sampled: bool, more: list[bool]
) -> None:
    """A group with place p, from 0, is in batch floor(p / size) or an earlier one, whatever signal others have."""
    rule = BatchRule.sampled(size) if is_sampled else BatchRule.full(size)
    taken = rule.num_taken(_numbers(answers), len(answers))
    batches = _batches(rule, answers + more)
    for number, has_signal in enumerate(more, start=len(answers) + 1):
        place = taken + number - len(answers) - 1
        batch = next((i for i, last in enumerate(batches) if number <= last), None)
        if has_signal and batch is not None:
            assert batch <= place // size


def _numbers(answers: list[bool]) -> list[int]:
    return [number for number, has_signal in enumerate(answers, start=1) if has_signal]


def _batches(rule: BatchRule, answers: list[bool]) -> list[int]:
    """Return the number of the last answer of each batch."""
    result, covered = list[int](), 0
    while (last := rule.last_answer(_numbers(answers[covered:]), len(answers) - covered)) is not None:
        covered += last
        result.append(covered)
    return result


@given(size=st.integers(1, 12), answers=st.lists(st.booleans(), max_size=100))
def test_sampled_batches_are_neither_too_large_nor_too_late(size: int, answers: list[bool]) -> None:
    rule, first = BatchRule.sampled(size), 0
    for last in _batches(rule, answers):
        batch = answers[first:last]
        assert size <= len(batch)
        assert 1 <= sum(batch) <= size
        assert sum(batch) >= rule.least_signal or len(batch) >= 2 * size
        assert len(batch) <= 2 * size or not any(batch[:-1])
        first = last
    rest = answers[first:]
    assert not (sum(rest) >= rule.least_signal and len(rest) >= size)
    assert not (any(rest) and len(rest) >= 2 * size)


def answered(replay: RolloutBuffer, signals: list[bool]) -> list[str]:
    """Lease and answer as many prompts; return the leases whose groups have signal."""
    lease_ids = [lease(replay) for _ in signals]
    for lease_id, has_signal in zip(lease_ids, signals, strict=True):
        offer(replay, lease_id, signal=has_signal)
    return [lease_id for lease_id, has_signal in zip(lease_ids, signals, strict=True) if has_signal]


def test_a_batch_is_the_same_whenever_the_trainer_asks(journal: Journal) -> None:
    """Nor does a crash move its end."""
    arguments = {"groups_per_step": 4, "max_staleness": 9, "sampled": True}
    replay = buffer(journal, **arguments)
    with_signal = answered(replay, [True, False, False, True, True, False, True, True, True])
    assert names(cut(replay).groups) == with_signal[:2], "of the first four answers"
    state = replay.state()
    again = resumed(journal, state, 1, **arguments)
    for one in (replay, again):
        assert names(cut(one).groups) == with_signal[2:5], "of the four behind them"
    assert again.next_batch(0.0) is None
    later = answered(again, [True, False, False])
    assert names(cut(again).groups) == [with_signal[5], *later]


def test_answers_without_signal_count_after_a_crash(journal: Journal) -> None:
    arguments = {"groups_per_step": 4, "max_staleness": 9, "sampled": True}
    replay = buffer(journal, **arguments)
    first = answered(replay, [False, True, True])
    restored = resumed(journal, None, 0, **arguments)
    assert restored.next_batch(0.0) is None
    answered(restored, [False])
    assert names(cut(restored).groups) == first
