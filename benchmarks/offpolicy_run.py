"""One training run of `benchmarks.offpolicy`, with a scripted staleness.

Guarantee: equal arguments give equal numbers on the same machine. The statistics are what the trainer itself reports in
`steps.jsonl`, averaged over the steps.
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
from prometheus_client import CollectorRegistry

from benchmarks.lockstep import LockstepFeed, Policies, Sampler, greedy_accuracy
from benchmarks.tasks import TASKS, reward_of
from consumer.app.run import Run
from consumer.app.setup import RunStart, Setup
from consumer.waiting import WaitPolicy
from protocol.config.loader import load_config
from protocol.runtime import json_lines as rotated_lines

ROUNDS = 4  # of prompts, at most, for a batch of groups with signal
_RATIO = "sampling/importance_sampling_ratio"
_STATISTICS = {
    "effective_sample_share": f"{_RATIO}/effective_sample_share",
    "kl": f"{_RATIO}/kl",
    "clipped_share": f"{_RATIO}/clipped_share",
    "staleness": "staleness/mean",
}


@dataclass(frozen=True)
class Plan:
    """What is the same for every run of a table."""

    task: str  # of `benchmarks.tasks`
    steps: int
    learning_rate: float
    evaluate_every: int
    base: str  # folder of the model, train.jsonl and eval.jsonl

    def settings(self, case: "Case", run_dir: Path) -> list[str]:
        """The values of one run that differ from those of the task's example."""
        return [
            f"run_dir={run_dir}",
            f"seed={case.seed}",
            f"model.path={self.base}",
            f"dataset={{path: {self.base}/train.jsonl}}",
            f"pipeline.max_staleness={case.staleness}",
            f"correction.preset={case.preset}",
            f"trainer.max_steps={self.steps}",
            f"trainer.learning_rate={self.learning_rate}",
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


def train(plan: Plan, case: Case, run_dir: Path) -> dict[str, Any]:
    """Trains one run and returns what came of it: `describe`, and the share of trained groups without signal."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    started = time.monotonic()
    settings = [*plan.settings(case, run_dir), 'trainer.save_strategy="no"', "observability.progress=false"]
    task = TASKS[plan.task]
    config, reward = load_config(task.config, settings), reward_of(task.config)
    setup = Setup.load(config, [], lambda: False)
    rows = [json.loads(line) for line in Path(plan.base, "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    sampler = Sampler(setup)

    def evaluate(blob: bytes) -> float:
        return greedy_accuracy(sampler, rows, blob, reward, config.sampling.max_completion_length)

    policies = Policies(case.staleness + 1, plan.evaluate_every, evaluate)
    feed = LockstepFeed(setup, sampler, policies, case.staleness, ROUNDS, reward)
    report = setup.report(Counter(), 0, CollectorRegistry())
    waits = WaitPolicy(check=lambda: None, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
    run = Run(setup, RunStart(case.name), feed, waits, report)
    run.submit = policies.submit  # type: ignore[method-assign]
    run.load()
    run.publish(0)
    try:
        run.train()
    finally:
        report.close()
    filler_share = feed.num_fillers / (plan.steps * config.pipeline.groups_per_step)
    return describe(plan, case, policies.curve, run_dir, started) | {"filler_share": filler_share}


def describe(plan: Plan, case: Case, curve: dict[int, float], run_dir: Path, started: float) -> dict[str, Any]:
    """A run as plain data: plan and case, `curve` as [step, accuracy], its last accuracy, the mean of it after step 0,
    and the trainer's statistics."""
    steps = rotated_lines.read(run_dir / "steps.jsonl")
    assert len(steps) == plan.steps, f"{run_dir}: {len(steps)} steps of {plan.steps}"
    return {
        "plan": asdict(plan),
        "case": asdict(case),
        "curve": sorted(curve.items()),
        "final": curve[plan.steps],
        "mean_over_training": statistics.fmean(accuracy for step, accuracy in curve.items() if step > 0),
        **{name: statistics.fmean(step[key] for step in steps) for name, key in _STATISTICS.items()},
        "wall_s": time.monotonic() - started,
    }
