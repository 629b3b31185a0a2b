"""A teacher's part in what tokens learn: on-policy distillation (arXiv:2306.13649; Lu, Thinking Machines Lab 2025). Pure
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


def teacher_buckets(group: RolloutGroup) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the tokens that the teacher scored in the place of each token, int32 (T, 1 + k), and their log-probs, float32. The
    token itself comes first. It also stands, with -inf, where the teacher gave no other."""
    ids, logprobs, own = group.teacher_top_ids, group.teacher_top_logprobs, group.completion_ids[:, None]
    assert ids is not None
    assert logprobs is not None
    assert group.teacher_logprobs is not None
    is_other = (ids >= 0) & (ids != own)
    others = np.where(is_other, np.maximum(logprobs, FLOOR), -np.inf)
    of_own = np.maximum(group.teacher_logprobs[:, None], FLOOR)
    return np.hstack([own, np.where(is_other, ids, own)]), np.hstack([of_own, others]).astype(np.float32)


@dataclass(frozen=True)
class DistillationRecipe:
    """The part of teachers in what a token learns, fixed for a run: `distillation`."""

    coef: float = 1.0
    alone: bool = False  # rewards teach nothing
    num_top: int = 0  # tokens of a teacher, whose divergence teaches; 0: advantages teach
    beta: float = 0.5  # of that divergence

    def signal(self, group: RolloutGroup, of_rewards: float) -> float:
        """Return how much a group can move the policy: `coef` times sum_t |log p_T - log p_S|, plus the signal of its rewards
        unless the teacher is `alone`."""
        own = self.coef * float(np.abs(teacher_advantages(group)).sum())
        return own if self.alone else own + of_rewards
