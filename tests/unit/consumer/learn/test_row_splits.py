"""Rows go to micro-batches of bounded size, with the least padding, and to ranks with about the same work."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.learn import row_splits
from consumer.learn.row_splits import _FIXED_TOKENS, least_tokens, shares, split_rows, tokens_of


def test_rows_of_like_length_stand_together_and_the_longest_first() -> None:
    assert split_rows([10, 500, 12, 480, 11], 1000, padded=True) == [[1, 3], [2, 4, 0]]


def test_a_row_above_the_limit_stands_alone() -> None:
    assert split_rows([5, 300, 5], 10, padded=True) == [[1], [0, 2]]


def test_packed_rows_take_no_more_than_their_own_room() -> None:
    lengths = [60, 30, 20, 10]
    assert split_rows(lengths, 120, padded=False) == [[0, 1, 2, 3]]
    assert split_rows(lengths, 120, padded=True) == [[0], [1, 2, 3]]


def test_one_more_pass_costs_something_too() -> None:
    assert split_rows([100, 90], 1000, padded=True) == [[0, 1]]
    assert split_rows([1000, 10], 10000, padded=True) == [[0], [1]]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=8), st.integers(1, 2000), st.booleans())
def test_no_cut_in_this_order_is_cheaper(lengths: list[int], max_tokens: int, padded: bool) -> None:
    def tokens(rows: list[int]) -> int:
        each = [lengths[row] for row in rows]
        return len(each) * max(each) if padded else sum(each)

    def cost(cut: list[list[int]]) -> int:
        return sum(tokens(rows) + _FIXED_TOKENS for rows in cut)

    cut = split_rows(lengths, max_tokens, padded=padded)
    order = [row for rows in cut for row in rows]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    allowed = []
    for count in range(len(order)):
        for ends in itertools.combinations(range(1, len(order)), count):
            other = [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]
            if all(len(rows) == 1 or tokens(rows) <= max_tokens for rows in other):
                allowed.append(cost(other))
    assert cost(cut) == min(allowed)


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 300))
def test_the_cheapest_cut_of_many_rows(lengths: list[int], max_tokens: int) -> None:
    """Every last micro-batch is tried for every number of rows."""
    length = sorted(lengths, reverse=True)
    cost = [0]
    for end in range(1, len(length) + 1):
        sizes = {begin: (end - begin) * length[begin] for begin in range(end)}
        fits = [begin for begin in sizes if sizes[begin] <= max_tokens or begin == end - 1]
        cost.append(_FIXED_TOKENS + min(cost[begin] + sizes[begin] for begin in fits))
    assert least_tokens(lengths, max_tokens, padded=True) == cost[-1]
    cut = split_rows(lengths, max_tokens, padded=True)
    assert sum(tokens_of([lengths[row] for row in rows], padded=True) for rows in cut) == cost[-1]


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (1, [[0, 1, 2, 3, 4]]),
        (2, [[0, 3], [1, 2, 4]]),  # 510 tokens each
        (7, [[0], [1], [2], [3], [4], [], []]),
    ],
)
def test_the_shares_of_ranks_by_hand(world: int, expected: list[list[int]]) -> None:
    found = shares([500, 490, 10, 10, 10], 1000, padded=False, world=world)
    assert [sorted(rows) for rows in found] == expected


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(1, 2000), st.booleans(), st.integers(1, 5))
def test_every_row_is_on_one_rank_and_equal_lengths_give_equal_shares(
    lengths: list[int], max_tokens: int, padded: bool, world: int
) -> None:
    found = shares(lengths, max_tokens, padded=padded, world=world)
    assert len(found) == world
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    assert shares(lengths, max_tokens, padded=padded, world=world) == found


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_the_busiest_of_eight_ranks_has_little_more_than_the_mean(sigma: float, padded: bool) -> None:
    draw = np.random.default_rng(0)
    excess = []
    for _ in range(20):
        lengths = (100 + np.minimum(4000, 400 * draw.lognormal(0, sigma, 64))).astype(int).tolist()
        work = []
        for rows in shares(lengths, 8192, padded=padded, world=8):
            own = [lengths[row] for row in rows]
            work.append(sum(tokens_of([own[i] for i in part], padded) for part in split_rows(own, 8192, padded=padded)))
        excess.append(max(work) / max(np.mean(work), tokens_of([max(lengths)], padded)))
    assert np.quantile(excess, 0.95) <= 1.05


@pytest.mark.parametrize("world", [2, 8])
def test_the_work_of_dealing_grows_with_the_rows(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    looked_at = 0

    def counted(lengths: list[int], max_tokens: int, *, padded: bool) -> int:
        nonlocal looked_at
        looked_at += len(lengths)
        return least_tokens(lengths, max_tokens, padded=padded)

    monkeypatch.setattr(row_splits, "least_tokens", counted)
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 1024).astype(int).tolist()
    shares(lengths, 16384, padded=True, world=world)
    assert looked_at <= 64 * len(lengths)
