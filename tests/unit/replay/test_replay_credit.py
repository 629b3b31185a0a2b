"""The credit for replays by hand: what is earned, spent, kept and forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.replay_table import ReplayCredit


def test_the_worked_example() -> None:
    credit = ReplayCredit(size=4, rate=1.0, max_replayed=3)
    assert credit.least_fresh == 4
    found = []
    for delivered, trained, missing in [(20, 4, 0), (20, 7, 1), (21, 9, 3)]:
        credit = credit.before(delivered, trained)
        found.append((credit.forgotten, credit.allowed(missing, delivered, trained)))
    assert found == [(12, 0), (12, 1), (12, 0)]
    assert ReplayCredit(size=4, rate=2.0, max_replayed=3).before(20, 4).forgotten == 16


@pytest.mark.parametrize(
    ("rate", "delivered", "trained", "allowed"),
    [
        (1.0, 100, 60, 40),
        (1.0, 100, 100, 0),
        (1.0, 100, 130, 0),  # never negative
        (1.5, 3, 2, 2),  # floor(4.5 - 2)
        (0.5, 3, 0, 1),
        (0.5, 1, 0, 0),
    ],
)
def test_what_is_earned_may_be_spent(rate: float, delivered: int, trained: int, allowed: int) -> None:
    credit = ReplayCredit(100, rate, 99)
    assert credit.allowed(99, delivered, trained) == allowed
    assert credit.allowed(1, delivered, trained) == min(1, allowed)


@pytest.mark.parametrize(
    ("rate", "max_replayed", "least"),
    [(1.0, 3, 4), (2.0, 3, 2), (3.0, 3, 2), (4.0, 1, 3), (0.5, 3, 4), (1.0, 0, 4)],
)
def test_the_leased_groups_that_a_batch_takes_at_least(rate: float, max_replayed: int, least: int) -> None:
    assert ReplayCredit(4, rate, max_replayed).least_fresh == least


def test_a_rate_of_one_trains_as_many_groups_as_are_delivered() -> None:
    """Of every eight delivered groups three have signal; the batch of eight is filled up with replays."""
    credit = ReplayCredit(size=8, rate=1.0, max_replayed=7)
    delivered = trained = 0
    for _ in range(100):
        delivered, trained = delivered + 8, trained + 3
        credit = credit.before(delivered, trained)
        trained += credit.allowed(5, delivered, trained)
    assert trained == delivered == 800


@given(
    rate=st.floats(0.01, 10),
    delivered=st.integers(0, 10**9),
    trained=st.integers(0, 10**9),
    missing=st.integers(0, 8),
)
def test_no_more_is_trained_than_was_earned(rate: float, delivered: int, trained: int, missing: int) -> None:
    allowed = ReplayCredit(8, rate, 7).before(delivered, trained).allowed(missing, delivered, trained)
    assert allowed == 0 or trained + allowed <= rate * delivered
    assert 0 <= allowed <= min(missing, 7)
