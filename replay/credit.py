"""The advantages of tokens by the rewards of the spans that they lie in and of later ones (DeepSeekMath, arXiv:2402.03300,
section 4.1.3, with a discount). Pure functions over one group.

Guarantee: equal groups give equal bits, on every rank and from a journal. Rewards of spans that are all equal, but for float
noise, add nothing.

A span is a run of tokens that has a reward of its own, which lies on its last sampled token (`RolloutGroup.span_ends`). Each
token belongs to the first span of its completion that ends with it or behind it; tokens behind the last span belong to none.
All records of a completion count as one sequence.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.advantages import EPSILON, deviations
from replay.groups import RolloutGroup

if TYPE_CHECKING:
    from protocol.config.rewards import RewardsSection


class Spans(NamedTuple):
    """The K spans of a group, ascending."""

    ends: NDArray[np.int64]  # (K,), the token that each ends with
    completions: NDArray[np.int32]  # (K,), whose each is
    rewards: NDArray[np.float64]  # (K,)

    @classmethod
    def of(cls, group: RolloutGroup, *, per_turn: bool = False) -> "Spans":
        """Return the spans as they were rewarded, or `per_turn` those of one turn as one, which has the sum of their rewards."""
        if group.credit is None or group.span_ends is None:
            return cls(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0))
        ends = np.flatnonzero(group.span_ends)
        rewards: NDArray[np.float64] = group.credit[ends].astype(np.float64)
        if per_turn:
            sampled, turns = np.flatnonzero(group.is_sampled), turns_of(group)
            rewarded, which = np.unique(turns[ends], return_inverse=True)
            ends = sampled[np.searchsorted(turns[sampled], rewarded, side="right") - 1]
            rewards = np.bincount(which, rewards).astype(np.float64)
        return cls(ends, _owners(group)[ends], rewards)


@dataclass(frozen=True)
class CreditRecipe:
    """The recipe by which a token gets its advantage, fixed for a run: `rewards.credit`, `gamma` and `outcome_weight`."""

    unit: Literal["per_turn", "per_step", "given"]
    gamma: float = 1.0
    outcome_weight: float = 1.0

    @classmethod
    def of(cls, section: "RewardsSection") -> "CreditRecipe | None":
        """Return the recipe of a run; None: a token has the advantage of its completion."""
        return None if section.credit == "outcome" else cls(section.credit, section.gamma, section.outcome_weight)

    def signal(self, group: RolloutGroup, of_outcome: float) -> float:
        """Return how much a group can move the policy: `outcome_weight` times the signal of its completions' rewards, plus
        sum_k |r_k - mean r| over its spans. Of `given` spans it is sum_k |r_k|."""
        if self.unit == "given":
            return of_outcome if group.credit is None else float(np.abs(self.spans(group).rewards).sum())
        result = self.outcome_weight * of_outcome
        if group.credit is not None:
            own, _ = deviations(self.spans(group).rewards[:, None])
            result += float(np.abs(own).sum())
        return result

    def advantages(self, group: RolloutGroup, of_outcome: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the advantage of each token, 0 where the policy did not sample it.

            A_t = outcome_weight · A_i + sum_{k >= k(t)} gamma^(k - k(t)) · (r_k - mean r) / (std r + eps)

        The sum is over the spans of completion i from the token's own, k(t), on. Mean and sample deviation are over all spans of
        the group. With `given` A_t = r_k(t) in a group with spans, and A_i in another one.

        Args:
            of_outcome: float64 (n,), A_i.

        Returns:
            float64 (T,).
        """
        is_given = self.unit == "given" and group.credit is not None
        result = (0.0 if is_given else self.outcome_weight) * of_outcome[_owners(group)]
        if group.credit is not None:
            spans = self.spans(group)
            own = np.searchsorted(
                spans.ends, np.arange(group.num_tokens)
            )  # the first that ends with a token or behind it
            known = np.minimum(own, len(spans.ends) - 1)
            is_own = (own < len(spans.ends)) & (spans.completions[known] == _owners(group))
            result = result + np.where(is_own, self.returns(spans)[known], 0.0)
        return np.where(group.is_sampled, result, 0.0)

    def spans(self, group: RolloutGroup) -> Spans:
        """Return the spans that have rewards: turns, with `per_turn`."""
        return Spans.of(group, per_turn=self.unit == "per_turn")

    def returns(self, spans: Spans) -> NDArray[np.float64]:
        """Return the discounted sum of normalised rewards from each span on, (K,); with `given` the reward of each."""
        if self.unit == "given":
            return spans.rewards
        returns = normalised(spans.rewards)
        for k in range(len(returns) - 2, -1, -1):
            if spans.completions[k] == spans.completions[k + 1]:
                returns[k] += self.gamma * returns[k + 1]
        return returns


def normalised(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (r - mean r) / (std r + eps) over all K of a group, with the sample deviation; zeros where all are equal."""
    deviation, _ = deviations(rewards[:, None])
    std = np.sqrt(np.square(deviation).sum() / max(len(rewards) - 1, 1))
    result: NDArray[np.float64] = deviation[:, 0] / (std + EPSILON)
    return result


def _owners(group: RolloutGroup) -> NDArray[np.int32]:
    """Return the completion of each token (T,)."""
    return np.repeat(group.completion_of, group.completion_lengths)


def turns_of(group: RolloutGroup) -> NDArray[np.int64]:
    """Return the turn of each token (T,), counted over the group: a turn is a run of sampled tokens of one record. Tokens that
    were shown have the turn before them."""
    sampled = group.is_sampled
    goes_on = np.concatenate([[False], sampled[:-1]])
    goes_on[[tokens.start for tokens in group.records]] = False
    return np.cumsum(sampled & ~goes_on)
