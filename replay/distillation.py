"""The advantages of tokens by a teacher: on-policy distillation (arXiv:2306.13649; Lu, Thinking Machines Lab 2025). Pure
functions over one group.

Guarantee: equal groups give equal bits, on every rank and from a journal. A token that was not sampled, or that the sampler could
not score, has 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.groups import RolloutGroup

FLOOR = -100.0
"""The least log-prob of a teacher that counts. No probability in float32 is below exp(-104), and vLLM writes -9999 for zero."""


def teacher_advantages(group: RolloutGroup) -> NDArray[np.float64]:
    """Return log p_T - log p_S of each token, float64 (T,): the teacher's log-prob minus that of the policy that sampled it. Its
    mean over tokens estimates minus the KL divergence of the policy from the teacher. Below `FLOOR` log p_T is that."""
    if group.teacher_logprobs is None:
        return np.zeros(group.num_tokens)
    result = np.maximum(group.teacher_logprobs.astype(np.float64), FLOOR) - group.logprobs.astype(np.float64)
    return np.where(group.is_sampled & ~np.isnan(result), result, 0.0)


@dataclass(frozen=True)
class DistillationRecipe:
    """The part of teachers in what a token learns, fixed for a run: `distillation.coef` and `distillation.alone`."""

    coef: float = 1.0
    alone: bool = False  # rewards teach nothing

    def signal(self, group: RolloutGroup, of_rewards: float) -> float:
        """Return how much a group can move the policy: `coef` times sum_t |log p_T - log p_S|, plus the signal of its rewards
        unless the teacher is `alone`."""
        own = self.coef * float(np.abs(teacher_advantages(group)).sum())
        return own if self.alone else own + of_rewards
