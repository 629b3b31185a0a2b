"""The slopes of synthetic series: what repeats itself is not found to grow, what leaks is."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from campaigns.soak.slopes import slope

Series = NDArray[np.float64]
Make = Callable[[np.random.Generator], Series]

HOURS = np.arange(300) * 10.0 / 3600  # fifty minutes, a sample every ten seconds
SECONDS = HOURS * 3600
BOUND = 5.0  # of a soak, in MB per hour
NUM_SERIES = 100


def remembering(chance: np.random.Generator, deviation: float = 5.0, memory: float = 0.9) -> Series:
    """Noise of which a sample keeps so much of the one before."""
    noise = chance.normal(0, deviation * math.sqrt(1 - memory**2), len(HOURS))
    for number in range(1, len(noise)):
        noise[number] += memory * noise[number - 1]
    return noise


def saw_toothed(chance: np.random.Generator, period_s: float = 95.0, height: float = 40.0) -> Series:
    return height * ((SECONDS + chance.uniform(0, period_s)) % period_s) / period_s


def step(chance: np.random.Generator, after_s: float, height: float = 30.0) -> Series:
    return np.where(after_s < SECONDS, height, 0.0) + chance.normal(0, 1.0, len(HOURS))


FLAT: dict[str, Make] = {
    "noise": lambda chance: chance.normal(500, 5, len(HOURS)),
    "noise that remembers": lambda chance: 500 + remembering(chance),
    "saw teeth": lambda chance: 500 + saw_toothed(chance),
    "long saw teeth": lambda chance: 500 + saw_toothed(chance, 400.0),
    "a step at the start": lambda chance: 500 + step(chance, 150.0),
    "a step anywhere": lambda chance: 500 + step(chance, chance.uniform(0, SECONDS[-1])),
    "a peak at the end": lambda chance: 500 + step(chance, SECONDS[-1] - 150.0),
}
LEAKS: dict[str, Make] = {
    "with noise": lambda chance: 15 * HOURS + chance.normal(500, 2, len(HOURS)),
    "with noise that remembers": lambda chance: 15 * HOURS + remembering(chance, 2.0, 0.8),
    "under saw teeth": lambda chance: 15 * HOURS + saw_toothed(chance),
    "after a step down": lambda chance: 15 * HOURS - step(chance, 300.0),
}


def lows(make: Make, x: Series = HOURS) -> Series:
    found = [slope(x, make(np.random.default_rng(seed))) for seed in range(NUM_SERIES)]
    return np.array([one.low for one in found if one is not None])


@pytest.mark.parametrize("kind", FLAT)
def test_what_is_flat_is_not_found_to_grow(kind: str) -> None:
    found = lows(FLAT[kind])
    assert np.mean(found > BOUND) <= 0.01
    assert np.mean(found > 0) <= 0.2


@pytest.mark.parametrize("kind", LEAKS)
def test_a_slow_leak_is_found(kind: str) -> None:
    found = lows(LEAKS[kind])
    assert np.mean(found > BOUND) >= 0.95
    assert np.mean(found > 15.1) <= 0.1, "the interval is not below what it is to hold"


def test_the_slope_of_a_straight_line_is_its_own() -> None:
    assert slope([3.0 * number for number in range(40)], [6.0 * number for number in range(40)]) == (2.0, 2.0, 2.0)


def test_whole_numbers_that_come_and_go_grow_by_exactly_nothing() -> None:
    """Descriptors of a daemon whose clients come and go."""
    assert np.max(lows(lambda chance: np.asarray(30.0 + chance.poisson(3.0, len(HOURS)), np.float64))) == 0.0


def test_a_descriptor_lost_every_five_minutes_is_found() -> None:
    found = lows(lambda chance: 30.0 + SECONDS // 300 + chance.poisson(1.0, len(HOURS)))
    assert np.min(found) > 0


def test_growth_is_asked_of_what_it_may_follow() -> None:
    """Groups do not come evenly, and while none come there is nothing to divide by."""
    groups = np.repeat(np.arange(30.0), 10) ** 2
    found = slope(groups, 7 * groups)
    assert found is not None
    assert found.value == pytest.approx(7)
    assert slope([1.0] * 300, [float(number) for number in range(300)]) is None


def test_too_few_samples_tell_nothing() -> None:
    assert slope([float(number) for number in range(23)], [float(number) for number in range(23)]) is None
    assert slope([float(number) for number in range(24)], [float(number) for number in range(24)]) is not None
