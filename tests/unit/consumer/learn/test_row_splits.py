"""Rows go to micro-batches of bounded size, with the least padding, and to ranks with about the same work."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.learn import row_splits
from consumer.learn.row_splits import _FIXED_TOKENS, Sizes, least_tokens, shares, split_rows


@st.composite
def sizes(draw: st.DrawFn, most: int = 12) -> Sizes:
    """Of padded rows, or of rows of a tree."""
    lengths = draw(st.lists(st.integers(1, 900), min_size=1, max_size=most))
    if draw(st.booleans()):
        return Sizes(lengths)
    return Sizes(lengths, [0, *(draw(st.integers(0, min(pair))) for pair in itertools.pairwise(lengths))])


def cost_of(sizes: Sizes) -> int:
    """Of one micro-batch of these rows."""
    return _FIXED_TOKENS + sizes.num_tokens


def test_rows_of_like_length_stand_together_and_the_longest_first() -> None:
    assert split_rows(Sizes([10, 500, 12, 480, 11]), 1000) == [[1, 3], [2, 4, 0]]


def test_a_row_above_the_limit_stands_alone() -> None:
    assert split_rows(Sizes([5, 300, 5]), 10) == [[1], [0, 2]]
    assert split_rows(Sizes([5, 300, 5], [0, 4, 4]), 10) == [[1], [0], [2]]


def test_rows_of_a_tree_take_the_room_that_they_add() -> None:
    lengths = [60, 30, 20, 10]
    assert split_rows(Sizes(lengths, [0, 0, 0, 0]), 120) == [[0, 1, 2, 3]]
    assert split_rows(Sizes(lengths), 120) == [[0], [1, 2, 3]]
    assert split_rows(Sizes([100] * 4, [0, 90, 90, 90]), 130) == [[0, 1, 2, 3]]


def test_rows_of_one_prompt_stay_together() -> None:
    """Two prompts of 90 tokens with two completions each; three rows would fit."""
    assert split_rows(Sizes([100] * 4, [0, 90, 0, 90]), 220) == [[0, 1, 2, 3]]
    assert split_rows(Sizes([100] * 4, [0, 90, 0, 90]), 210) == [[0, 1], [2, 3]]


def test_the_largest_pass_of_trees_is_the_first() -> None:
    assert split_rows(Sizes([10, 400, 100], [0, 0, 0]), 500) == [[1, 2], [0]]


def test_one_more_pass_costs_something_too() -> None:
    assert split_rows(Sizes([100, 90]), 1000) == [[0, 1]]
    assert split_rows(Sizes([1000, 10]), 10000) == [[0], [1]]


@pytest.mark.long
@given(sizes(most=8), st.integers(1, 2000))
def test_no_cut_in_this_order_is_cheaper(sizes: Sizes, max_tokens: int) -> None:
    def cost(cut: list[list[int]]) -> int:
        return sum(cost_of(sizes.of(rows)) for rows in cut)

    cut = split_rows(sizes, max_tokens)
    order = [row for rows in cut for row in rows]
    assert sorted(order) == list(range(len(sizes.lengths)))
    if sizes.shared is None:
        assert [sizes.lengths[row] for row in order] == sorted(sizes.lengths, reverse=True)
    else:
        assert all(rows == list(range(rows[0], rows[-1] + 1)) for rows in cut)
        order.sort()
    allowed = []
    for count in range(len(order)):
        for ends in itertools.combinations(range(1, len(order)), count):
            other = [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]
            if all(len(rows) == 1 or sizes.of(rows).num_tokens <= max_tokens for rows in other):
                allowed.append(cost(other))
    assert cost(cut) == min(allowed) == least_tokens(sizes, max_tokens)


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 300))
def test_the_cheapest_cut_of_many_rows(lengths: list[int], max_tokens: int) -> None:
    """Every last micro-batch is tried for every number of rows."""
    length = sorted(lengths, reverse=True)
    cost = [0]
    for end in range(1, len(length) + 1):
        sizes = {begin: (end - begin) * length[begin] for begin in range(end)}
        fits = [begin for begin in sizes if sizes[begin] <= max_tokens or begin == end - 1]
        cost.append(_FIXED_TOKENS + min(cost[begin] + sizes[begin] for begin in fits))
    assert least_tokens(Sizes(lengths), max_tokens) == cost[-1]
    cut = split_rows(Sizes(lengths), max_tokens)
    assert sum(cost_of(Sizes(lengths).of(rows)) for rows in cut) == cost[-1]


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (1, [[0, 1, 2, 3, 4]]),
        (2, [[0, 3], [1, 2, 4]]),  # 510 tokens each
        (7, [[0], [1], [2], [3], [4], [], []]),
    ],
)
def test_the_shares_of_ranks_by_hand(world: int, expected: list[list[int]]) -> None:
    found = shares(Sizes([500, 490, 10, 10, 10], [0] * 5), 1000, world=world)
    assert found == expected


@pytest.mark.long
@given(sizes(), st.integers(1, 2000), st.integers(1, 5))
def test_every_row_is_on_one_rank_and_equal_sizes_give_equal_shares(sizes: Sizes, max_tokens: int, world: int) -> None:
    found = shares(sizes, max_tokens, world=world)
    assert len(found) == world
    assert sorted(row for rows in found for row in rows) == list(range(len(sizes.lengths)))
    assert shares(sizes, max_tokens, world=world) == found


@pytest.mark.parametrize(("prompt", "most"), [(None, 1.05), (0, 1.05), (100, 1.05), (800, 1.15)])
@pytest.mark.parametrize("sigma", [pytest.param(0.6, marks=pytest.mark.long), 1.0])
def test_the_busiest_of_eight_ranks_has_little_more_than_the_mean(
    sigma: float, prompt: int | None, most: float
) -> None:
    """Of padded rows, or of groups of eight of one prompt, which is computed once more on each rank that has a part of one."""
    draw = np.random.default_rng(0)
    excess = []
    for _ in range(10):
        lengths = (100 + np.minimum(4000, 400 * draw.lognormal(0, sigma, 64))).astype(int).tolist()
        step = Sizes(lengths)
        if prompt is not None:
            step = Sizes([prompt + each for each in lengths], [prompt if row % 8 else 0 for row in range(64)])
        work = [least_tokens(step.of(rows), 8192) for rows in shares(step, 8192, world=8)]
        excess.append(max(work) / max(np.mean(work), cost_of(Sizes([max(step.lengths)]))))
    assert np.quantile(excess, 0.95) <= most


def test_groups_stay_on_one_rank_where_that_is_no_more_work() -> None:
    step = Sizes([1000] * 32, [900 if row % 8 else 0 for row in range(32)])
    assert shares(step, 8192, world=4) == [list(range(first, first + 8)) for first in (0, 8, 16, 24)]


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("padded", [True, False])
def test_the_work_of_dealing_grows_with_the_rows(monkeypatch: pytest.MonkeyPatch, world: int, padded: bool) -> None:
    looked_at = 0

    def counted(sizes: Sizes, max_tokens: int) -> int:
        nonlocal looked_at
        looked_at += len(sizes.lengths)
        return least_tokens(sizes, max_tokens)

    monkeypatch.setattr(row_splits, "least_tokens", counted)
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 1024).astype(int).tolist()
    shared = [300 if row % 8 else 0 for row in range(1024)]
    shares(Sizes(lengths) if padded else Sizes([300 + each for each in lengths], shared), 16384, world=world)
    assert looked_at <= 64 * len(lengths)
