"""The advantages of completions from the rewards of their groups. Pure functions.

Guarantee: every advantage is finite; it is 0 where nothing is known (no reward, or none to compare with).

N = groups x num_generations completions, a group's completions adjacent; F reward functions; NaN in a reward means "this function
gave none" and is left out of every mean and standard deviation. Names and formulas are TRL's (`scale_rewards`,
`multi_objective_aggregation`), so a run moves between the two without surprises.
"""

import torch

from replay.deviations import EPSILON


def combined_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over the functions: (N, F), (F,) -> (N,); NaN where no function gave a reward."""
    total = (rewards * weights).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def nanstd(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sample standard deviation (n - 1) over the non-NaN values of `dim`, kept as a dimension of size 1."""
    count = (~values.isnan()).sum(dim=dim, keepdim=True)
    deviations = values - values.nanmean(dim=dim, keepdim=True)
    return (deviations.square().nansum(dim=dim, keepdim=True) / (count - 1)).sqrt()


def centred(values: torch.Tensor, dim: int, baseline: str) -> torch.Tensor:
    """Return values minus their baseline along `dim`, float, same shape; NaN where there is no value or nothing to compare with.

    `group`: the mean of all n, x_i - mean x. `leave_one_out`: the mean of the other n - 1 (RLOO, arXiv:2402.14740),
    x_i - (sum x - x_i) / (n - 1) = n / (n - 1) (x_i - mean x). `none`: 0 (REINFORCE).
    """
    if baseline == "none":
        return values
    deviations = values - values.nanmean(dim=dim, keepdim=True)
    if baseline == "group":
        return deviations
    count = (~values.isnan()).sum(dim=dim, keepdim=True)
    return deviations * (count / (count - 1))


def advantages(
    rewards: torch.Tensor,
    weights: torch.Tensor,
    num_generations: int,
    *,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
    baseline: str = "group",
) -> torch.Tensor:
    """Return group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2).

    `sum_then_normalize`: A = (R - baseline) / (std R + eps), R the weighted sum; std over the group, over the batch
    (`scale_rewards="batch"`, arXiv:2508.08221), or no division at all (`"none"`, Dr. GRPO, arXiv:2503.20783; RLOO with
    `baseline="leave_one_out"`). The standard deviation is that of the rewards, whatever the baseline.
    `normalize_then_sum`: every function is centred and divided by its deviation within its group first, then weighted,
    summed and normalized over the batch, whatever `scale_rewards` (GDPO, arXiv:2601.05242).

    Args:
        rewards: float (N, F).
        weights: float (F,).

    Returns:
        float (N,), 0 for a completion without any reward.
    """
    if aggregation == "normalize_then_sum":
        grouped = rewards.view(-1, num_generations, rewards.shape[1])
        normalized = centred(grouped, 1, baseline) / (nanstd(grouped, dim=1) + EPSILON)
        total = combined_rewards(normalized.view(rewards.shape), weights)
        result = (total - total.nanmean()) / (nanstd(total, dim=0) + EPSILON)
        return result.nan_to_num(nan=0.0)
    total = combined_rewards(rewards, weights)
    grouped = total.view(-1, num_generations)
    result = centred(grouped, 1, baseline)
    if scale_rewards == "group":
        result = result / (nanstd(grouped, dim=1) + EPSILON)
    elif scale_rewards == "batch":
        result = result / (nanstd(total, dim=0) + EPSILON)
    return result.flatten().nan_to_num(nan=0.0)
