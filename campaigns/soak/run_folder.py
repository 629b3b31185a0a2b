"""What the two runs of a soak need on the disk: models, prompts, rewards that misbehave, configurations.

Guarantee: equal seeds give equal files. The run `evaluated` is plain, with evaluations of held-out prompts; of `agents` all
completions come from agents, which cannot be evaluated, so that it takes two. Both score with workers and serve clients. What a
run may keep for inspection is so little that its bounds are reached within the warm-up.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NAMES = ("evaluated", "agents")
_NUM_PROMPTS = 61
_KINDS = ("parity", "parity", "flat", "parity", "rough")  # in turn
_REWARDS = '''"""Parity of the tokens. Of the prompts that are `rough`, a call in a few does harm."""

import os
import subprocess
import sys
import time


def parity(prompts, completions, completion_ids, kind, **columns):
    odd = [float(sum(ids) % 2) for ids in completion_ids]
    if kind[0] == "flat":
        return [0.5] * len(odd)
    if kind[0] == "rough":
        misbehave(sum(map(sum, completion_ids)) % 25)
    return odd


def misbehave(chance):
    match chance:
        case 0:
            time.sleep(3600)
        case 1:
            subprocess.Popen(["sleep", "3600"], start_new_session=True)
            time.sleep(3600)
        case 2:
            os._exit(3)
        case 3:
            raise ValueError("this group cannot be scored")
        case 4:
            print("a reward that talks " * 50, file=sys.stderr)
'''


@dataclass(frozen=True)
class RunFolder:
    """One of the two runs."""

    name: str
    config_file: Path
    run_dir: Path

    @property
    def has_agents(self) -> bool:
        return self.name == "agents"


def prepare(folder: Path, seed: int) -> list[RunFolder]:
    """Writes everything; `folder` needs a short path, because the runs' sockets lie in it."""
    from tests.integration.models import build_model

    build_model("qwen2", folder / "model", seed=0)
    (folder / "rewards.py").write_text(_REWARDS)
    rows = [{"prompt": f"{i}+{i}=", "kind": _KINDS[i % len(_KINDS)]} for i in range(_NUM_PROMPTS)]
    _write_rows(folder / "train.jsonl", rows)
    _write_rows(folder / "held-out.jsonl", [row | {"kind": "parity"} for row in rows[:8]])
    return [_write_run(folder, name, seed) for name in NAMES]


def _write_run(folder: Path, name: str, seed: int) -> RunFolder:
    run = RunFolder(name, folder / f"{name}.yaml", folder / name)
    values = _shared(folder, seed) | {"run_dir": str(run.run_dir)}
    computed = {"function": f"{folder / 'rewards.py'}:parity"}
    if run.has_agents:
        values["pipeline"]["groups_per_step"] = 2  # as fast as agents are
        values["rewards"]["functions"] = [computed, {"posted": "judged"}]
    else:
        values["rewards"]["functions"] = [computed]
        values["evaluation"] = {"dataset": {"path": str(folder / "held-out.jsonl")}, "every_versions": 10}
    run.config_file.write_text(yaml.safe_dump(values))
    return run


def _shared(folder: Path, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "dataset": {"path": str(folder / "train.jsonl")},
        "rewards": {"num_workers": 1, "timeout_s": 1.0},
        "sampling": {"num_generations": 4, "max_completion_length": 8},
        "pipeline": {
            "groups_per_step": 4,
            "max_staleness": 2,
            "lease_timeout_s": 10.0,
            "data_backoff_s": 0.1,
            "infra_backoff_s": 0.05,
            "max_failed_share": 1.0,
        },
        "replay": {"mode": "signal", "max_size": 16, "min_size": 4, "keep_bytes": 100_000},
        "swap": {"probe_every": 0},
        "serve": {"enabled": True, "version_ttl_s": 2.0},
        "transport": {"heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 3.0},
        "observability": {"progress": False, "rollouts_max_bytes": 65_536},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "checkpoints": {"keep_adapters": 2},  # by default they are 100 after a while, and would look like a leak
        "trainer": {
            "max_steps": 10_000_000,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "save_steps": 10,
            "save_total_limit": 2,
            "gradient_checkpointing": False,
        },
    }


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
