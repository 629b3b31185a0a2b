"""One training run of `benchmarks.offpolicy`, with a scripted staleness.

Guarantee: equal arguments give equal numbers; a result that is on the disk is whole.
"""

import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from benchmarks.lockstep import LockstepFeed, Policies, Sampler, greedy_accuracy
from consumer.loop import TrainingLoop
from consumer.patience import Patience
from consumer.setup import Setup
from protocol.config_file import load_config

CONFIG = "examples/arithmetic/run.yaml"
RATIO = "sampling/importance_sampling_ratio"
ROUNDS = 4  # of prompts, at most, for a batch of groups with signal


@dataclass(frozen=True)
class Plan:
    """What is the same for every run of a table."""

    steps: int
    learning_rate: float
    evaluate_every: int
    base: Path

    def overrides(self, case: "Case", run_dir: Path) -> list[str]:
        return [
            f"run_dir={run_dir}",
            f"seed={case.seed}",
            f"model.path={self.base}",
            f"dataset.path={self.base}/train.jsonl",
            f"pipeline.max_staleness={case.staleness}",
            f"correction.preset={case.preset}",
            f"trainer.max_steps={self.steps}",
            f"trainer.learning_rate={self.learning_rate}",
            'trainer.save_strategy="no"',
            "observability.progress=false",
        ]


@dataclass(frozen=True)
class Case:
    """One run of a table."""

    preset: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.staleness}-seed{self.seed}"


def train(plan: Plan, case: Case, folder: Path) -> dict[str, Any]:
    """Trains one run and returns what came of it."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    run_dir = folder / "work" / case.name
    (run_dir / "steps.jsonl").unlink(missing_ok=True)
    started = time.monotonic()
    config = load_config(CONFIG, plan.overrides(case, run_dir))
    setup = Setup.load(config, [], lambda: False)
    rows = [json.loads(line) for line in (plan.base / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    sampler = Sampler(setup)
    length = config.sampling.max_completion_length
    policies = Policies(
        case.staleness + 1, plan.evaluate_every, lambda blob: greedy_accuracy(sampler, rows, blob, length)
    )
    feed = LockstepFeed(setup, sampler, policies, case.staleness, ROUNDS)
    report = setup.report(Counter(), 0)
    patience = Patience(check=lambda: None, say=report.say, stall_timeout_s=60.0)
    loop = TrainingLoop(setup, policies, feed, report, patience, None, case.name)
    loop.control.publish(0)
    try:
        assert loop.train()
    finally:
        report.close()
    steps = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return asdict(case) | {
        "curve": policies.curve,
        "steps": len(steps),
        "learning_rate": plan.learning_rate,
        "wall_s": time.monotonic() - started,
        **{
            name: statistics.fmean(step[f"{RATIO}/{name}"] for step in steps)
            for name in ("effective_sample_share", "kl", "clipped_share")
        },
    }
