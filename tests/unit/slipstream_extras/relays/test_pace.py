"""When a source is left, by hand and for every way to be slow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_extras.relays.relay_download import PATIENCE_S, Pace, Rates, allowed_s

MB = 1_000_000


def pace(*notes: tuple[int, float], rate: float = 10 * MB) -> Pace:
    """Of 40 MB in pieces of 1 MB, which others got at 10 MB/s: 18 s in all, and 2.4 s for a piece."""
    made = Pace(40 * MB, MB, rate, 100.0)
    for done, now in notes:
        made.note(done, 100.0 + now)
    return made


def test_what_may_take_how_long() -> None:
    assert (allowed_s(40 * MB, 10 * MB), allowed_s(MB, 10 * MB)) == (18.0, 2.4)


@pytest.mark.parametrize(
    ("notes", "now", "why"),
    [
        ([], 2.3, None),
        ([], 2.5, "silent"),
        ([(MB, 2.0)], 4.3, None),
        ([(MB, 2.0)], 4.5, "silent"),
        ([(MB, 2.0), (MB, 4.0), (MB - 1, 4.0)], 4.5, "silent"),  # the same again is no progress
        ([(41 * MB, 2.0)], 2.5, "silent"),  # more than there is, neither
        ([(4 * MB, 2.0), (5 * MB, 2.9)], 2.9, None),  # it has only begun
        ([(4 * MB, 2.0), (5 * MB, 3.0)], 3.0, "slow"),  # 1 MB/s, and the other 35 MB would take 35 s
        ([(4 * MB, 2.0), (8 * MB, 3.0)], 3.0, None),  # 4 MB/s, and the other 32 MB would take 8 s
        ([(4 * MB, 2.0), (8 * MB, 3.0)], 5.0, "slow"),  # 1.3 MB/s by now
        ([(MB, 1.0), (39 * MB, 17.8)], 17.8, "slow"),  # the last one would take 0.44 s
        ([(MB, 1.0), (39 * MB, 17.5)], 17.5, None),
        ([(MB, 1.0), (40 * MB - 1, 17.9)], 18.1, "slow"),
    ],
)
def test_by_hand(notes: list[tuple[int, float]], now: float, why: str | None) -> None:
    assert pace(*notes).lateness(100.0 + now) == why


def test_the_slowest_of_the_last_downloads_counts_and_what_is_assumed_before() -> None:
    rates = Rates()
    assert rates.bytes_per_s == 2**20
    for _ in range(8):
        rates.note(40 * MB, 2.0)
    rates.note(40 * MB, 4.0)
    assert rates.bytes_per_s == 10 * MB
    for _ in range(8):
        rates.note(40 * MB, 2.0)
    assert rates.bytes_per_s == 20 * MB
    rates.note(MB, 100.0)
    assert rates.bytes_per_s == 2**20, "and nobody talks it down for long"
    rates.note(MB, 0.0)


@pytest.mark.long
@given(
    st.integers(1, 10**9),
    st.integers(1, 10**6),
    st.floats(2.0**20, 1e9),
    st.lists(st.tuples(st.floats(0.001, 3.0), st.integers(-5, 2 * 10**9)), max_size=50),
)
def test_whatever_a_source_says_it_is_left_by_its_deadline(
    num_bytes: int, piece: int, rate: float, said: list[tuple[float, int]]
) -> None:
    made, now = Pace(num_bytes, piece, rate, 0.0), 0.0
    for after, done in said:
        now += after
        if made.lateness(now) is None:
            made.note(done, now)
    assert made.lateness(allowed_s(num_bytes, rate) + PATIENCE_S + 1e-6) is not None


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.floats(2.0**20, 1e9))
def test_one_that_is_as_fast_as_the_others_is_not_left(num_bytes: int, piece: int, rate: float) -> None:
    made, now, done = Pace(num_bytes, piece, rate, 0.0), 0.0, 0
    for step in range(1, 21):
        now, done = num_bytes * step / 20 / rate, num_bytes * step // 20
        if now - num_bytes * (step - 1) / 20 / rate <= PATIENCE_S:
            made.note(done, now)
            assert made.lateness(now) is None
