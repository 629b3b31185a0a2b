"""Small things that the tests of `consumer` need again and again."""

from pathlib import Path
from typing import Any

import numpy as np

from protocol.config import RunConfig
from replay.groups import RolloutGroup


def run_config(run_dir: Path, model: Path | str = "model", **sections: Any) -> RunConfig:
    """A run of 2 groups x 4 completions of up to 6 tokens; `sections` replace or add to the sections."""
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": str(model), "dtype": "float32"},
        "dataset": {"path": str(run_dir / "train.jsonl")},
        "rewards": {"functions": [{"function": "rewards:first", "weight": 1.0}]},
        "sampling": {"num_generations": 4, "max_completion_length": 6},
        "pipeline": {"groups_per_step": 2},
        "lora": {"r": 4, "lora_alpha": 8},
        "trainer": {"learning_rate": 1e-3, "gradient_checkpointing": False},
    }
    for name, value in sections.items():
        values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
    return RunConfig.model_validate(values)


def rollout_group(
    completions: list[list[int]],
    *,
    prompt: list[int] | None = None,
    rewards: list[list[float]] | list[float] | None = None,
    logprobs: list[list[float]] | None = None,
    truncated: list[bool] | None = None,
    group_id: str = "s-1",
    version: int = 0,
) -> RolloutGroup:
    """A group of exactly these completions; rewards 0, 1, 2, ... and log-probs -0.1, -0.2, ... unless given."""
    count = len(completions)
    lengths = np.array([len(ids) for ids in completions], np.int32)
    flat = [-0.1 * (i + 1) for i in range(int(lengths.sum()))]
    values = np.array(rewards if rewards is not None else range(count), np.float32)
    return RolloutGroup(
        group_id=group_id,
        policy_version=version,
        prompt_ids=np.array(prompt or [3, 4], np.int32),
        completion_lengths=lengths,
        completion_ids=np.concatenate(completions).astype(np.int32),
        logprobs=np.concatenate([flat] if logprobs is None else logprobs).astype(np.float32),
        rewards=values.reshape(count, -1),
        truncated=np.array(truncated or [False] * count),
    )
