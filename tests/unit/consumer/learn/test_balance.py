"""The rows of a step are dealt out to ranks so that none of them has much more work than another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.learn import row_splits as balance
from consumer.learn.row_splits import least_tokens, shares, split_rows, tokens_of


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

    monkeypatch.setattr(balance, "least_tokens", counted)
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 1024).astype(int).tolist()
    shares(lengths, 16384, padded=True, world=world)
    assert looked_at <= 64 * len(lengths)
