"""The advantages of completions from the rewards of their groups, in float64. Pure functions.

Guarantee: every advantage is finite; it is 0 where nothing is known (no reward, or none to compare with). Rewards that differ by
float noise only do not deviate at all.

N = groups x num_generations completions, a group's completions adjacent; F reward functions; NaN in a reward means "this function
gave none" and is left out of every mean and standard deviation. Names and formulas are TRL's (`scale_rewards`,
`multi_objective_aggregation`), so a run moves between the two without surprises.
"""

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4
"""Added to every standard deviation, as TRL does."""

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # values closer than this are equal, as in numpy.isclose

Rewards = NDArray[np.float32] | NDArray[np.float64]


def weighted_sums(rewards: Rewards, weights: Rewards) -> NDArray[np.float64]:
    """Compute the worth of each completion: the weighted sum of its rewards, (n, k), (k,) -> (n,).

    A missing reward adds nothing; a completion without any is worth NaN, not 0. With weights 1 and 0.5:

        [[1.0, 2.0],        [2.0,    1 + 0.5 x 2
         [1.0, NaN],   ->    1.0,    1
         [NaN, NaN]]         NaN]    nothing is known
    """
    missing = np.isnan(rewards)
    totals: NDArray[np.float64] = np.where(missing, 0.0, rewards).astype(np.float64) @ weights.astype(np.float64)
    totals[missing.all(axis=1)] = np.nan
    return totals


def deviations(columns: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Compute deviations from the mean of a column's scored values (0 where a value is missing and in columns of equals), and
    count the scored values: (n, k) -> (n, k), (k,)."""
    missing = np.isnan(columns)
    low, high = np.fmin.reduce(columns, axis=0), np.fmax.reduce(columns, axis=0)
    differ = high - low > ABSOLUTE + RELATIVE * np.abs(low)
    counts = len(columns) - missing.sum(axis=0)
    means = np.where(missing, 0.0, columns).sum(axis=0) / np.maximum(counts, 1)
    return np.where(missing | ~differ, 0.0, columns - means), counts


def scale(centred: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute the sample standard deviation of a column plus `EPSILON`, of what `deviations` returns: (n, k), (k,) -> (k,); NaN
    where there are no two values."""
    variances = (centred * centred).sum(axis=0) / np.where(counts > 1, counts - 1, np.nan)
    return np.asarray(np.sqrt(variances) + EPSILON)


def standardized(columns: NDArray[np.float64], baseline: str, *, divide: bool = True) -> NDArray[np.float64]:
    """Return values minus the baseline of their column, divided by its sample standard deviation plus `EPSILON` if `divide`:
    (n, k) -> (n, k), NaN where there is no value or nothing to compare with.

    `group`: the mean of all n, x_i - mean x. `leave_one_out`: the mean of the other n - 1 (RLOO, arXiv:2402.14740),
    x_i - (sum x - x_i) / (n - 1) = n / (n - 1) (x_i - mean x). `none`: 0 (REINFORCE). The standard deviation is that of the
    values, whatever the baseline.
    """
    centred, counts = deviations(columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        divisor = scale(centred, counts) if divide else 1.0
        if baseline == "leave_one_out":
            centred = centred * (counts / (counts - 1))
        result = (columns if baseline == "none" else centred) / divisor
    return np.where(np.isnan(columns), np.nan, result)


def advantages(
    rewards: Rewards,
    weights: Rewards,
    num_generations: int,
    *,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
    baseline: str = "group",
) -> NDArray[np.float64]:
    """Return group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2).

    `sum_then_normalize`: A = (R - baseline) / (std R + eps), R the weighted sum; std over the group, over the batch
    (`scale_rewards="batch"`, arXiv:2508.08221), or no division at all (`"none"`, Dr. GRPO, arXiv:2503.20783; RLOO with
    `baseline="leave_one_out"`).
    `normalize_then_sum`: every function is centred and divided by its deviation within its group first, then weighted,
    summed and normalized over the batch, whatever `scale_rewards` (GDPO, arXiv:2601.05242).

    Args:
        rewards: float (N, F).
        weights: float (F,).

    Returns:
        float64 (N,), 0 for a completion without any reward.
    """
    if aggregation == "normalize_then_sum":
        values, by_group = rewards.astype(np.float64), (-1, num_generations, rewards.shape[1])
        columns = values.reshape(by_group).swapaxes(0, 1).reshape(num_generations, -1)  # of each group and function
        normalized = standardized(columns, baseline).reshape(num_generations, -1, rewards.shape[1])
        totals = weighted_sums(normalized.swapaxes(0, 1).reshape(values.shape), weights)
        return np.nan_to_num(standardized(totals[:, None], "group")[:, 0])
    totals = weighted_sums(rewards, weights)
    columns = totals.reshape(-1, num_generations).T
    result = standardized(columns, baseline, divide=scale_rewards == "group").T.ravel()
    if scale_rewards == "batch":
        result = result / scale(*deviations(totals[:, None]))
    return np.nan_to_num(result)
