"""The advantages of a group's tokens where rewards of turns or spans credit them, and these rewards.

Guarantee: they are the trainer's own, by `replay.credit`, from the recorded advantages of the completions. Where these are not
recorded they count as 0, and `is_whole` is False unless they have no weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.credit import CreditRecipe, turns_of
from replay.groups import RolloutGroup


class Rewarded(NamedTuple):
    """A turn or a span that has a reward."""

    number: int  # from 1, in its completion
    reward: float
    from_here: float  # the discounted sum of normalised rewards from it on
    advantage: float  # of its tokens


@dataclass(frozen=True, eq=False)
class Credit:
    unit: str  # turn or span
    advantages: NDArray[np.float64]  # (T,)
    is_whole: bool
    rewarded: list[list[Rewarded]]  # of each completion

    @classmethod
    def of(cls, group: RolloutGroup, recipe: CreditRecipe, of_outcome: Sequence[float] | None) -> "Credit":
        """Compute them; `of_outcome` are the advantages of the completions, if they are known."""
        is_known = of_outcome is not None and len(of_outcome) == group.num_completions
        advantages = recipe.advantages(group, np.array(of_outcome if is_known else np.zeros(group.num_completions)))
        spans, turns = recipe.spans(group), turns_of(group)
        per_turn = recipe.unit == "per_turn"
        owners = np.repeat(group.completion_of, group.completion_lengths)
        first = [int(turns[group.is_sampled & (owners == one)].min()) for one in range(group.num_completions)]
        rewarded: list[list[Rewarded]] = [[] for _ in range(group.num_completions)]
        for end, completion, reward, from_here in zip(*spans, recipe.returns(spans), strict=True):
            number = int(turns[end]) - first[completion] + 1 if per_turn else len(rewarded[completion]) + 1
            rewarded[completion].append(Rewarded(number, float(reward), float(from_here), float(advantages[end])))
        return cls("turn" if per_turn else "span", advantages, is_known or not recipe.outcome_weight, rewarded)
