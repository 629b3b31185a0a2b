"""Everything a chaos run needs on the disk, in one temporary folder.

Guarantee: equal seeds give equal folders. Prompts of every kind are in the dataset: with signal, without, groups in which
every completion fails, with signal and without, or solves, and one whose reward always raises.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NUM_PROMPTS = 61
_BROKEN = 7
_KINDS = ("flat", "failing", "negative", "solved", "parity", "parity", "parity", "parity")  # in turn
_REWARDS = '''"""Parity of the tokens: most groups have both."""


def parity(prompts, completions, completion_ids, kind, **columns):
    if kind[0] == "broken":
        raise ValueError("this prompt cannot be scored")
    odd = [float(sum(ids) % 2) for ids in completion_ids]
    chance = sum(map(sum, completion_ids)) % 3  # the same for all completions
    match kind[0]:
        case "flat":
            return [0.5] * len(odd)
        case "failing":  # no signal, and a failure two times in three
            return [0.0 if chance else 0.5] * len(odd)
        case "negative":  # as often a failure, but with signal
            return [value - 1.0 if chance else value for value in odd]
        case "solved":
            return [1.0 if chance else value for value in odd]
    return odd
'''


@dataclass(frozen=True)
class Shape:
    """What a campaign varies in the configuration."""

    max_staleness: int = 2
    sync_interval: int = 1
    num_iterations: int = 1
    keep_all: bool = True
    again: bool = True  # groups are replayed, prompts return or are in cooldown
    full: bool = False  # the weights themselves train


DEFAULT = Shape()


def prepare(folder: Path, sockets: Path, seed: int, shape: Shape) -> dict[str, Any]:
    """Writes model, dataset, reward and configuration (`run.yaml`), and returns the configuration."""
    from datasets import Dataset, disable_progress_bars

    from tests.integration.models import build_model

    disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    build_model("qwen2", folder / "model", seed=0)
    kinds = ["broken" if i == _BROKEN else _KINDS[i % len(_KINDS)] for i in range(NUM_PROMPTS)]
    rows = [{"prompt": f"{i}+{i}=", "kind": kind} for i, kind in enumerate(kinds)]
    Dataset.from_list(rows).save_to_disk(folder / "prompts")
    (folder / "rewards.py").write_text(_REWARDS)
    config = {
        "run_dir": str(folder / "run"),
        "seed": seed,
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if shape.full else "float32"},
        "dataset": {"path": str(folder / "prompts")},
        "rewards": {
            "functions": [{"function": f"{folder / 'rewards.py'}:parity"}],
            "num_workers": 1,
        },
        "sampling": {"num_generations": 4, "max_completion_length": 6},
        "pipeline": {
            "groups_per_step": 2,
            "max_staleness": shape.max_staleness,
            "sync_interval": shape.sync_interval,
            "lease_timeout_s": 4.0,
            "data_backoff_s": 0.1,
            "infra_backoff_s": 0.05,
            "stall_timeout_s": 90.0,
        },
        "replay": {
            "mode": "signal" if shape.again else "fifo",
            "max_size": 8,
            "min_size": 2,
            "max_share": 0.5,
            "max_times_sampled": 3,
            "max_age_versions": 8,
            "keep_all": shape.keep_all,
            "keep_bytes": 20_000,
        },
        "reroll": {
            "max_attempts": 2 if shape.again else 0,
            "delay_versions": 1,
            "max_share": 0.4,
            "solved_cooldown_epochs": 1 if shape.again else 0,
        },
        "transport": {
            "endpoint": f"ipc://{sockets}/control.ipc",
            "heartbeat_interval_s": 0.2,
            "heartbeat_timeout_s": 1.0,
        },
        "observability": {"progress": False},
        "lora": None if shape.full else {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"},
        "trainer": {
            "max_steps": 1_000_000,
            "learning_rate": 5e-6 if shape.full else 1e-3,  # so that patches grow
            "lr_scheduler_type": "constant",
            "num_iterations": shape.num_iterations,
            "save_steps": 3,
            "save_total_limit": 3,
            "gradient_checkpointing": False,
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps(config))
    return config
