"""Deviations of rewards from the mean of their group.

Guarantee: rewards that differ by float noise only do not deviate at all.
"""

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4
"""Added to every standard deviation, as TRL does."""

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # values closer than this are equal, as in numpy.isclose


def deviations(columns: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Compute deviations from the mean of a column's scored values (0 where a value is missing and in columns of equals), and
    count the scored values: (n, k) -> (n, k), (k,)."""
    missing = np.isnan(columns)
    low, high = np.fmin.reduce(columns, axis=0), np.fmax.reduce(columns, axis=0)
    differ = high - low > ABSOLUTE + RELATIVE * np.abs(low)
    counts = len(columns) - missing.sum(axis=0)
    means = np.where(missing, 0.0, columns).sum(axis=0) / np.maximum(counts, 1)
    return np.where(missing | ~differ, 0.0, columns - means), counts
