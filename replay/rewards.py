"""The worth of a group's rewards to the policy, before any tensor is made of them, and the watch for rewards that differ.

Guarantee: `signal(group) > 0` exactly if the group gives some completion, span or token an advantage, whatever the baseline and
the scaling; rewards that differ by float noise only do not count as different. A group of eight takes 20 to 30
microseconds. A run whose last groups all had no signal ends with an error, which says what the rewards were and the likely
causes; a run that merely waits does not.

Conventions: n completions of a group, F reward functions, F' = F + 1 columns with an overlong punishment and F without;
NaN means "this function gave none".
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protocol.config.run import RunConfig
from protocol.errors import DataFailuresError, NoSignalError, SlipstreamError
from replay.advantages import EPSILON, RELATIVE, advantages, deviations, weighted_sums
from replay.credit import CreditRecipe
from replay.distillation import DistillationRecipe
from replay.groups import RolloutGroup


@dataclass(frozen=True)
class OverlongPenalty:
    """The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13)."""

    buffer_tokens: int  # L_cache, at least 1
    penalty: float
    max_completion_length: int  # L_max

    def punishment(self, lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """-clip((|y| - (L_max - L_cache)) / L_cache, 0, 1) of lengths |y|: (n,) -> (n,) in [-1, 0]."""
        excess = lengths - (self.max_completion_length - self.buffer_tokens)
        result: NDArray[np.float32] = -np.minimum(np.maximum(excess, 0) / self.buffer_tokens, 1.0).astype(np.float32)
        return result


@dataclass(frozen=True, eq=False)
class RewardRecipe:
    """The recipe by which rewards become one number per completion, fixed for a run. `aggregation` is TRL's
    `multi_objective_aggregation`."""

    weights: NDArray[np.float32]  # of the rewards in a reported sum
    aggregation: str = "sum_then_normalize"
    overlong: OverlongPenalty | None = None
    credit: CreditRecipe | None = None  # None: a token has the advantage of its completion
    distillation: DistillationRecipe | None = None  # None: there are no teachers
    outcome_weights: NDArray[np.float32] | None = None  # of the rewards in an advantage; None: `weights`
    scale_rewards: str = "group"
    baseline: str = "group"

    @classmethod
    def of(cls, config: RunConfig, aggregation: str, scale_rewards: str) -> "RewardRecipe":
        """The recipe of a run; what has its default in TRL comes from TRL's arguments."""
        buffer_tokens = config.advantage.overlong_buffer_tokens
        overlong = OverlongPenalty(
            buffer_tokens, config.advantage.overlong_penalty, config.sampling.max_completion_length
        )
        weights, of_outcome = (np.array(each, np.float32) for each in (config.reward_weights, config.outcome_weights))
        credit, teachers = CreditRecipe.of(config.rewards), config.distillation
        distillation = None
        if teachers is not None:
            distillation = DistillationRecipe(teachers.coef, teachers.alone, teachers.num_top, teachers.mixture)
        punishment = overlong if buffer_tokens else None
        return cls(
            weights, aggregation, punishment, credit, distillation, of_outcome, scale_rewards, config.advantage.baseline
        )

    @property
    def num_top(self) -> int:
        """The number of a teacher's likeliest tokens; 0 where no divergence teaches."""
        return 0 if self.distillation is None else self.distillation.num_top

    @cached_property
    def column_weights(self) -> NDArray[np.float32]:
        """The weights of the columns of `columns` in an advantage, float32 (F',)."""
        weights = self.weights if self.outcome_weights is None else self.outcome_weights
        if self.overlong is None:
            return weights
        return np.append(weights, np.float32(self.overlong.penalty))

    def columns(self, group: RolloutGroup) -> NDArray[np.float32]:
        """Return float32 (n, F'): the group's rewards, and the overlong punishment as if one more function had given it.

        A completion that no function scored is not punished either, so that it stays out of every mean.
        """
        if self.overlong is None:
            return group.rewards
        punishment = self.overlong.punishment(group.longest_lengths)
        punishment[np.isnan(group.rewards).all(axis=1)] = np.nan
        return np.concatenate([group.rewards, punishment[:, None]], axis=1)

    def advantages(self, groups: list[RolloutGroup]) -> NDArray[np.float64]:
        """Return (N,), of the completions in the order of the groups, as many in each; zeros where teachers alone teach."""
        rewards = np.concatenate([self.columns(group) for group in groups])
        if self.distillation is not None and self.distillation.alone:
            return np.zeros(len(rewards))
        return advantages(
            rewards, self.column_weights, groups[0].num_completions,
            scale_rewards=self.scale_rewards, aggregation=self.aggregation, baseline=self.baseline,
        )  # fmt: skip

    def mean_reward(self, group: RolloutGroup) -> float:
        """Mean over the scored completions of the functions' weighted sum, without punishment; NaN if none is scored."""
        totals = weighted_sums(group.rewards, self.weights)
        scored = totals[~np.isnan(totals)]
        return float(scored.mean()) if len(scored) else float("nan")

    def signal(self, group: RolloutGroup) -> float:
        """Return how much a group can move the policy: the sum of its |A_i| before they are divided by a standard deviation.

        Without a baseline: sum_i |R_i|.
        `sum_then_normalize`: sum_i |R_i - mean R| over the scored completions, R the weighted sum of the columns.
        `normalize_then_sum`: sum_i |sum_f w_f (r_if - mean_f) / (std_f + eps)|; its last division is by the batch's.
        With `credit` rewards of spans count beside it, with `distillation` teachers.
        """
        result = self._signal_of_outcome(group)
        if self.credit is not None:
            result = self.credit.signal(group, result)
        return result if self.distillation is None else self.distillation.signal(group, result)

    def _signal_of_outcome(self, group: RolloutGroup) -> float:
        columns = self.columns(group)
        if self.baseline == "none":
            return float(np.nansum(np.abs(weighted_sums(columns, self.column_weights))))
        if self.aggregation == "sum_then_normalize":
            own, _ = deviations(weighted_sums(columns, self.column_weights)[:, None])
            return float(np.abs(own).sum())
        own, counts = deviations(columns.astype(np.float64))
        std = np.sqrt((own * own).sum(axis=0) / np.maximum(counts - 1, 1))
        total = np.abs(own @ (self.column_weights / (std + EPSILON)))
        if total.max() <= RELATIVE * np.abs(self.column_weights).sum():  # the functions cancel out
            return 0.0
        return float(total.sum())


class SignalWatch:
    """The streak of groups without signal that goes on now; one of `max_groups` is hopeless, None: none is."""

    def __init__(self, max_groups: int | None) -> None:
        self._max_groups = max_groups
        self._forget()

    @property
    def is_bounded(self) -> bool:
        return self._max_groups is not None

    def _forget(self) -> None:
        self._num_groups = self._num_completions = self._num_truncated = 0
        self._low, self._high = math.inf, -math.inf  # of the mean rewards of the groups that were scored

    def note(self, group: RolloutGroup, mean_reward: float | None, *, has_signal: bool) -> None:
        """`mean_reward` is None if nothing of the group was scored."""
        if has_signal:
            self._forget()
            return
        self._num_groups += 1
        self._num_completions += group.num_completions
        self._num_truncated += int(group.was_truncated.sum())
        if mean_reward is not None:
            self._low, self._high = min(self._low, mean_reward), max(self._high, mean_reward)

    def check(self) -> None:
        """Raise NoSignalError if the streak is hopeless, DataFailuresError if nothing of it was scored."""
        if self._max_groups is not None and self._num_groups >= self._max_groups:
            raise self._error(" (guards.max_groups_without_signal)")

    def check_stalled(self, *, ever_had_signal: bool) -> None:
        """Call it when no batch came for too long. Raises as `check` if that is because no group of the run ever had signal."""
        if self._num_groups and not ever_had_signal:
            raise self._error(", all that came before pipeline.stall_timeout_s ended the wait")

    def _error(self, bound: str) -> SlipstreamError:
        truncated = self._num_truncated / max(1, self._num_completions)
        head = f"none of the last {self._num_groups} groups had rewards that differ{bound}, so there is nothing to learn from"
        if self._low > self._high:
            return DataFailuresError(
                f"{head}: no completion was scored at all. The reward functions returned None or NaN for every one; see what "
                "they were given with `slipstream journal show`, fix them, and go on with --resume"
            )
        if self._high - self._low < 1e-6:
            got = f"every completion was worth {self._low:g}"
        else:
            got = f"completions of a group were worth the same, from {self._low:g} in one group to {self._high:g} in another"
        return NoSignalError(
            f"{head}: {got}, and {truncated:.0%} of the completions were cut by sampling.max_completion_length. Likely causes: "
            "the reward function does not recognize answers in the form that the model gives (see `slipstream journal show`); "
            "the task is far too hard or too easy for this model; completions are cut before the answer; "
            "sampling.temperature is so low that all completions of a prompt are alike. Fix it, and go on with --resume"
        )
