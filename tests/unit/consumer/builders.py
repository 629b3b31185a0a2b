"""Small things that the tests of `consumer` need again and again. None of them needs torch, which takes seconds to import."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from consumer.report.steps import LearningMetrics
from protocol.config.run import RunConfig
from protocol.wire.codec import encode
from replay.batch_selection import OfferedGroup
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape, RolloutGroup, message_of
from replay.journal.writer import Journal
from tests.unit.replay.builders import buffer

SHAPE = GroupShape(num_generations=4, num_rewards=1, max_completion_length=6, vocab_size=64)


def run_config(run_dir: Path, model: Path | str = "model", dtype: str = "float32", **sections: Any) -> RunConfig:
    """A run of 2 groups x 4 completions of up to 6 tokens; `sections` replace or add to the sections."""
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": str(model), "dtype": dtype},
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
    lease_id: str = "s-1",
    version: int = 0,
    token_versions: list[int] | None = None,
    sampled: list[list[bool]] | None = None,
    episodes: list[int] | None = None,
    credit: dict[int, float] | None = None,
    teacher: list[float] | None = None,
    top: list[list[tuple[int, float]]] | None = None,
    generation_s: float = 0.0,
) -> RolloutGroup:
    """A group of exactly these completions, or records with `episodes`; rewards 0, 1, 2, ... and log-probs -0.1, -0.2, ... (0 for
    what is not sampled) unless given. `credit` has the rewards of spans by the tokens that they end with, `teacher` a
    teacher's log-probs, and `top` its likeliest tokens with theirs."""
    count = len(set(episodes)) if episodes else len(completions)
    lengths = np.array([len(ids) for ids in completions], np.int32)
    flat = [-0.1 * (i + 1) for i in range(int(lengths.sum()))]
    mask = None if sampled is None else np.concatenate(sampled).astype(np.bool_)
    if mask is not None and logprobs is None:
        flat = np.where(mask, flat, 0.0).tolist()
    ends = np.isin(np.arange(lengths.sum()), list(credit or {}))
    spans = np.array([(credit or {}).get(token, 0.0) for token in range(int(lengths.sum()))], np.float32)
    values = np.array(rewards if rewards is not None else range(count), np.float32)
    return RolloutGroup(
        lease_id=lease_id,
        policy_version=version,
        prompt_ids=np.array(prompt or [3, 4], np.int32),
        completion_lengths=lengths,
        completion_ids=np.concatenate(completions).astype(np.int32),
        logprobs=np.concatenate([flat] if logprobs is None else logprobs).astype(np.float32),
        rewards=values.reshape(count, -1),
        truncated=np.array(truncated or [False] * len(completions)),
        token_versions=None if token_versions is None else np.array(token_versions, np.int32),
        sampled=mask,
        episodes=None if episodes is None else np.array(episodes, np.int32),
        credit=None if credit is None else spans,
        span_ends=None if credit is None else ends,
        teacher_logprobs=None if teacher is None else np.array(teacher, np.float32),
        teacher_top_ids=None if top is None else np.array(top)[..., 0].astype(np.int32),
        teacher_top_logprobs=None if top is None else np.array(top)[..., 1].astype(np.float32),
        generation_s=generation_s,
    )


def delivery(group: RolloutGroup, producer: str = "p") -> OfferedGroup:
    return OfferedGroup(group, encode(message_of(group)), producer)


def live_buffer(journal: Journal, **arguments: Any) -> RolloutBuffer:
    """The buffer of a trainer process with version 0 published, two groups a step; a failed prompt goes out again at once."""
    return buffer(journal, **({"backoff_s": 0.0} | arguments))


def fill(replay: RolloutBuffer, count: int = 2, *, dull: int = 0) -> list[str]:
    """Leases and answers `count` prompts, and then `dull` more without signal. Returns the first ones' groups."""
    lease_ids, outcomes = [], ["accepted"] * count + ["no_signal"] * dull
    for _ in outcomes:
        record = replay.lease("p", now=0.0, timeout_s=60.0)
        assert record is not None
        lease_ids.append(record.lease_id)
    rewards = [[0.0, 1.0, 2.0, 3.0]] * count + [[0.0] * 4] * dull
    groups = [
        rollout_group([[3], [4], [5], [6]], rewards=values, lease_id=lease_id)
        for lease_id, values in zip(lease_ids, rewards, strict=True)
    ]
    assert replay.offer([delivery(group) for group in groups]) == outcomes
    return lease_ids[:count]


def learning_metrics() -> LearningMetrics:
    return LearningMetrics(CollectorRegistry(), ["exact"], max_steps=9, max_staleness=1)


class Growing(Counter[str]):
    """Counts to which another thread adds a name whenever one is looked at."""

    def items(self) -> Iterator[tuple[str, int]]:  # type: ignore[override]
        for pair in super().items():
            yield pair
            self[f"another_{len(self)}"] += 1


class Clock:
    """Stands in for the module `time`: it passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
