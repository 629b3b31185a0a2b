"""Small things that the tests of `replay` need again and again."""

from typing import Any

import numpy as np

from protocol.messages import Group
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape, RolloutGroup
from replay.ledger import PromptLedger
from replay.staleness import StalenessBudget
from replay.table import FifoTable

SHAPE = GroupShape(num_generations=2, num_rewards=1, max_completion_length=4, vocab_size=10)


def group_message(lease_id: str = "s-1", version: int = 0, **changes: Any) -> Group:
    """A valid message of SHAPE: completions [3, 4, 5] and [6], rewards 0 and 1."""
    values = {
        "lease_id": lease_id,
        "policy_version": version,
        "prompt_ids": np.array([1, 2], "<i4").tobytes(),
        "completion_lengths": np.array([3, 1], "<i4").tobytes(),
        "completion_ids": np.array([3, 4, 5, 6], "<i4").tobytes(),
        "logprobs": np.array([-0.1, -0.2, -0.3, -0.4], "<f4").tobytes(),
        "rewards": np.array([0.0, 1.0], "<f4").tobytes(),
        "truncated": bytes([0, 1]),
        "generation_s": 0.0,
        "reward_s": 0.0,
    }
    return Group(**(values | changes))


def group(lease_id: str, version: int = 0, *, signal: bool = True) -> RolloutGroup:
    rewards = np.array([0.0, float(signal)], "<f4").tobytes()
    return SHAPE.parse(group_message(lease_id, version, rewards=rewards))


def rewards_differ(candidate: RolloutGroup) -> bool:
    return bool(np.ptp(candidate.rewards) > 0)


def ledger(num_prompts: int = 4, **changes: Any) -> PromptLedger:
    values = {"seed": 0, "shuffle": False, "max_attempts": 3, "session": "s"}
    return PromptLedger(num_prompts, **(values | changes))


def buffer(
    num_prompts: int = 1000, *, max_failed_share: float = 0.5, max_attempts: int = 3, **budget: int
) -> RolloutBuffer:
    """A buffer whose version 0 is published."""
    result = RolloutBuffer(
        ledger(num_prompts, max_attempts=max_attempts),
        StalenessBudget(**({"groups_per_step": 2, "max_staleness": 0} | budget)),
        FifoTable(),
        has_signal=rewards_differ,
        max_failed_share=max_failed_share,
    )
    result.published(0)
    return result
