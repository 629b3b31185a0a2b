"""Adaptive staleness: sequences worked by hand, the limits as properties, and a simulated pipeline that it settles in."""

import itertools
import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.prompts.adaptive_staleness import (
    LONGEST_PATIENCE,
    WAIT_TO_WIDEN,
    WINDOW,
    StalenessController,
)


def controller(least: int = 1, greatest: int = 4, min_effective_share: float = 0.5) -> StalenessController:
    return StalenessController(least, greatest, min_effective_share)


def steps(
    control: StalenessController, count: int, *, share: float | None = 0.9, wait: float = 0.0
) -> list[str | None]:
    return [control.note(effective_share=share, wait_share=wait) for _ in range(count)]


def decision(control: StalenessController, *, share: float = 0.9, wait: float = 0.0) -> str | None:
    """After a cool-down and a window of equal steps; none before the last of them."""
    *before, last = steps(control, 2 * WINDOW, share=share, wait=wait)
    assert before == [None] * (2 * WINDOW - 1)
    return last


def windows_until_a_change(control: StalenessController, *, share: float = 0.9, wait: float = 0.0) -> int:
    """After the cool-down, in which it has to be now."""
    num_steps = next(
        count for count in range(1, 10_000) if control.note(effective_share=share, wait_share=wait) is not None
    )
    assert num_steps % WINDOW == 0
    return num_steps // WINDOW - 1


# By hand.


def test_it_begins_at_the_least_and_widens_when_the_trainer_waits() -> None:
    control = controller()
    assert control.staleness == 1
    assert (
        decision(control, share=0.91, wait=0.34)
        == "widened 1 -> 2: the trainer waited 34% of the time for rollouts, effective sample share 0.91"
    )
    assert control.staleness == 2


def test_it_narrows_when_too_little_of_a_batch_counts() -> None:
    control = controller()
    decision(control, wait=0.5)
    assert decision(control, share=0.42, wait=0.1) == "narrowed 2 -> 1: effective sample share 0.42, below 0.5"
    assert decision(control, share=0.1) is None, "never below the least"


def test_a_widening_that_saves_no_time_is_taken_back() -> None:
    control = controller()
    decision(control, wait=0.5)
    assert (
        decision(control, wait=0.48)
        == "narrowed 2 -> 1: widening saved no time: the trainer waited 50% before, 48% since"
    )


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        # From 1 to 2 versions, latency alone would save min(wait, 1/3) of a step's time; half of that is asked for.
        (0.90, 0.85, True),  # a step takes 1 / 0.15 instead of 1 / 0.1 times its training: a third is saved
        (0.90, 0.87, True),  # 1 - 0.10 / 0.13 = 0.23, at least 0.167
        (0.90, 0.89, False),  # 0.09
        (0.50, 0.39, True),  # 1 - 0.50 / 0.61 = 0.18
        (0.50, 0.41, False),  # 0.15
        (0.20, 0.10, True),  # 1 - 0.80 / 0.90 = 0.111, at least 0.1
        (0.20, 0.12, False),  # 0.09
        (0.20, 0.30, False),
        (1.00, 1.00, False),
        (1.00, 0.99, True),
    ],
)
def test_what_a_widening_has_to_save(before: float, after: float, stays: bool) -> None:
    control = controller(greatest=2)
    decision(control, wait=before)
    assert control.staleness == 2
    decision(control, wait=after)
    assert control.staleness == (2 if stays else 1)


@pytest.mark.parametrize(
    ("share", "wait", "widens"),
    [
        (0.625, 0.2, True),  # a quarter of the way from the bound to 1
        (0.624, 0.2, False),
        (0.9, WAIT_TO_WIDEN + 0.001, True),
        (0.9, WAIT_TO_WIDEN, False),
    ],
)
def test_widening_wants_room_and_a_reason(share: float, wait: float, widens: bool) -> None:
    assert (decision(controller(), share=share, wait=wait) is not None) == widens


def test_one_stall_in_a_window_is_no_evidence() -> None:
    control = controller()
    steps(control, WINDOW)
    assert control.note(effective_share=0.9, wait_share=1.0) is None
    assert steps(control, 3 * WINDOW) == [None] * 3 * WINDOW


def test_every_widening_that_is_taken_back_doubles_the_time_until_the_next() -> None:
    control = controller(greatest=2)
    assert windows_until_a_change(control, wait=0.5) == 1
    waited = []
    for _ in range(8):
        assert windows_until_a_change(control, share=0.3) == 1
        waited.append(windows_until_a_change(control, wait=0.5))
    assert waited == [2, 4, 8, 16, 32, 64, 64, 64]
    assert LONGEST_PATIENCE == 64


def test_two_widenings_in_a_row_show_that_the_first_was_right() -> None:
    control = controller()
    decision(control, wait=0.5)
    decision(control, share=0.3)
    assert windows_until_a_change(control, wait=0.6) == 2
    assert windows_until_a_change(control, wait=0.4) == 2, "the second still takes patience"
    assert control.staleness == 3
    assert windows_until_a_change(control, wait=0.2) == 1


@pytest.mark.parametrize("share", [None, math.nan, math.inf])
def test_a_step_without_an_effective_share_is_left_out(share: float | None) -> None:
    control = controller()
    steps(control, WINDOW)
    assert steps(control, 100, share=share, wait=0.9) == steps(control, 100, wait=math.nan) == [None] * 100
    steps(control, WINDOW - 1, wait=0.2)
    assert control.note(effective_share=share, wait_share=1.0) is None
    (last,) = steps(control, 1, wait=0.2)
    assert "waited 20%" in str(last)


def test_a_wide_budget_takes_longer_to_drain() -> None:
    control = controller(30, 40)
    assert decision(control, wait=0.5) is not None
    assert steps(control, 31 + WINDOW - 1, share=0.1) == [None] * (31 + WINDOW - 1)
    assert steps(control, 1, share=0.1) != [None]


# A restart.


def test_a_restored_controller_goes_on_after_a_window_of_warming_up() -> None:
    original = controller(greatest=2)
    decision(original, wait=0.5)
    decision(original, share=0.3)
    resumed = controller(greatest=2)
    resumed.restore(json.loads(json.dumps(original.state())))
    assert resumed.state() == original.state()
    assert windows_until_a_change(original, wait=0.9) == windows_until_a_change(resumed, wait=0.9) == 2


def test_a_restored_staleness_obeys_the_limits_of_now() -> None:
    wide, narrow = controller(3, 6), controller(1, 2)
    narrow.restore(wide.state())
    assert narrow.staleness == 2
    wide.restore(controller(0, 1).state())
    assert wide.staleness == 3


# Properties.


@given(
    limits=st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted),
    min_share=st.floats(0.01, 0.99),
    shown=st.lists(
        st.tuples(
            st.none() | st.floats(0, 1) | st.just(math.nan), st.floats(0, 1) | st.just(math.nan), st.integers(1, 30)
        ),
        max_size=12,
    ),
)
def test_it_stays_within_its_limits_and_needs_a_window_for_every_change(
    limits: list[int], min_share: float, shown: list[tuple[float | None, float, int]]
) -> None:
    least, greatest = limits
    control = controller(least, greatest, min_share)
    staleness, evidence = limits[0], -WINDOW
    for share, wait, repeats in shown:
        for _ in range(repeats):
            known = share is not None and not math.isnan(share) and not math.isnan(wait)
            evidence += evidence < 0 or known
            found = control.note(effective_share=share, wait_share=wait)
            if found is not None:
                assert evidence >= WINDOW
                assert f" {staleness} -> {control.staleness}: " in found
                assert abs(control.staleness - staleness) == 1
                staleness, evidence = control.staleness, -WINDOW
            assert control.staleness == staleness
            assert limits[0] <= staleness <= limits[1]


# A simulated pipeline.

Pipeline = Callable[[int], tuple[float, float]]  # staleness -> effective and wait share


def latency_bound(latency: float, loss_of_share: float) -> Pipeline:
    """A batch takes `latency` to generate and 1 to train, and staleness + 1 batches are under way at once, so a step takes
    max(1, latency / (staleness + 1)); every version of age takes `loss_of_share` from the effective share."""

    def show(staleness: int) -> tuple[float, float]:
        return 0.98 - loss_of_share * staleness, 1 - 1 / max(1.0, latency / (staleness + 1))

    return show


def throughput_bound(staleness: int) -> tuple[float, float]:
    """An engine that is full: the trainer waits 40 % of the time, whatever the budget."""
    return 0.98 - 0.05 * staleness, 0.4


def simulate(pipeline: Pipeline, num_steps: int, *, noise: float, seed: int, greatest: int = 8) -> list[int]:
    """The staleness after every step. Data is as old as the budget was when it was generated, some steps ago."""
    draw = random.Random(seed)
    control = controller(0, greatest)
    trace = [0]
    for _ in range(num_steps):
        age = trace[max(0, len(trace) - 1 - trace[-1])]
        share, wait = (min(1.0, max(0.0, value + draw.gauss(0, noise))) for value in pipeline(age))
        control.note(effective_share=share, wait_share=wait)
        trace.append(control.staleness)
    return trace


def changes(trace: list[int]) -> int:
    return sum(before != after for before, after in itertools.pairwise(trace))


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("pipeline", "settles_at", "at_most"),
    [
        # latency 3.4: the wait is 71 %, 41 %, 12 % at 0, 1, 2; two are enough, and the share is no obstacle
        (latency_bound(3.4, 0.05), 2, 2),
        (latency_bound(0.8, 0.05), 0, 0),
        # latency 9: it would take 8, but at 3 the share, 0.98 - 0.14 x 3 = 0.56, leaves no room for more
        (latency_bound(9.0, 0.14), 3, 3),
        # the share falls off a cliff: 0.78 at 1, 0.38 at 3, 0.58 at 2 is neither too low nor room
        (latency_bound(9.0, 0.2), 2, 2),
        # 0.68 at 1 invites to widen, 0.38 at 2 forbids it: tried ever more rarely
        (latency_bound(9.0, 0.3), 1, 13),
        (throughput_bound, 0, 14),
    ],
    ids=["enough", "no-wait", "no-room", "near-the-bound", "cliff", "full-engine"],
)
def test_it_settles_in_a_simulated_pipeline(
    pipeline: Pipeline, settles_at: int, at_most: int, noise: float, seed: int
) -> None:
    trace = simulate(pipeline, 1000, noise=noise, seed=seed)
    assert changes(trace) <= at_most
    assert trace[200:].count(settles_at) >= 0.85 * len(trace[200:])
