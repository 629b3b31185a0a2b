"""Rewards that charge for length: `length_penalty`, `reasoning_length`.

Guarantee: lengths are those of the sampled token ids, never of text that was encoded again.
"""

from collections.abc import Callable
from typing import Any

from protocol.config.sections.builtin_rewards import LengthPenalty, ReasoningLength


def length_penalty(options: LengthPenalty) -> Callable[..., list[float]]:
    def score_all(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        return [penalty(options, len(ids)) for ids in completion_ids]

    return score_all


def reasoning_length(options: ReasoningLength) -> Callable[..., list[float]]:
    def score_all(reasoning_tokens: list[int], **_columns: Any) -> list[float]:
        return [penalty(options, tokens) for tokens in reasoning_tokens]

    return score_all


def penalty(options: LengthPenalty, num_tokens: int) -> float:
    """The penalty, in [-at_most, 0]."""
    return -min(options.at_most, options.per_token * max(0, num_tokens - options.free_tokens))
