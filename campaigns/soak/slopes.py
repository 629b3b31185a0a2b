"""How fast a series of samples grows, and between which bounds that lies with 95 % confidence.

Guarantee: a series that only repeats itself, or has a step or two and is flat otherwise, is not found to grow; one that grows
all the time is, whatever repeats on top of it, as long as what repeats is shorter than a block (a sixteenth of the series).

Memory and descriptors of a daemon are saw-toothed (collections, checkpoints, caches) and remember their past, so that
neighbouring samples say nearly the same. Least squares take each of them for news: their interval is far too narrow, and one
step tilts their line. Here a block of neighbouring samples counts once, by its lower quartile: what is never given back is
there in the quiet instants too, and peaks say nothing. Of these the slope is the median of all pairs' slopes (Theil and Sen),
which a step does not tilt, and the interval is that of Kendall's rank correlation, which asks for no distribution. What the
blocks still remember of each other widens it (as of Yue and Wang, by their correlation at lag 1).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_BLOCKS = 16
FEWEST_BLOCKS = 8
SAMPLES_PER_BLOCK = 3  # at least
_FLOOR = 0.25
_TWO_SIDED_95 = 1.959964
_MOST_CORRELATED = 0.9


class Slope(NamedTuple):
    """Per unit of x."""

    value: float
    low: float
    high: float


def slope(x: Sequence[float], y: Sequence[float]) -> Slope | None:
    """Of a series in the order of `x`, which does not fall; None if it is too short to tell anything.

    Args:
        x: seconds, or whatever else the series may grow with.
    """
    num_blocks = min(MOST_BLOCKS, len(x) // SAMPLES_PER_BLOCK)
    if num_blocks < FEWEST_BLOCKS:
        return None
    places, floors = (_floors(values, num_blocks) for values in (x, y))
    first, second = np.triu_indices(num_blocks, 1)
    runs = places[second] - places[first]
    rises = (floors[second] - floors[first])[runs > 0]
    slopes = np.sort(rises / runs[runs > 0])
    if len(slopes) == 0:
        return None
    value = float(np.median(slopes))
    half = _TWO_SIDED_95 * _spread(floors) * math.sqrt(_memory(floors - value * places)) / 2
    low, high = math.floor(len(slopes) / 2 - half) - 1, math.ceil(len(slopes) / 2 + half)
    return Slope(value, float(slopes[_within(low, slopes)]), float(slopes[_within(high, slopes)]))


def _floors(values: Sequence[float], num_blocks: int) -> NDArray[np.float64]:
    """The lower quartile of each block. It is one of the samples, so that counts stay whole numbers."""
    blocks = np.array_split(np.asarray(values, float), num_blocks)
    return np.array([np.quantile(block, _FLOOR, method="lower") for block in blocks])


def _spread(values: NDArray[np.float64]) -> float:
    """Standard deviation of Kendall's S of so many independent values, some of which may be equal."""
    num = len(values)
    _, ties = np.unique(values, return_counts=True)
    pairs = num * (num - 1) * (2 * num + 5) - float(np.sum(ties * (ties - 1) * (2 * ties + 5)))
    return math.sqrt(pairs / 18)


def _memory(residuals: NDArray[np.float64]) -> float:
    """How many times as much the slope varies as with independent blocks: (1 + r) / (1 - r)."""
    centred = residuals - residuals.mean()
    total = float(centred @ centred)
    if total == 0.0:
        return 1.0
    correlation = min(_MOST_CORRELATED, max(0.0, float(centred[1:] @ centred[:-1]) / total))
    return (1 + correlation) / (1 - correlation)


def _within(index: int, values: NDArray[np.float64]) -> int:
    return min(len(values) - 1, max(0, index))
