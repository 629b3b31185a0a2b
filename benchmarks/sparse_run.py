"""One training run of `benchmarks.sparse`.

Guarantee: equal arguments give equal numbers. The curve is over completion tokens generated, all of them: groups
without signal and groups that were never trained count like any other.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from prometheus_client import CollectorRegistry

from benchmarks.lockstep import Sampler
from benchmarks.sparse_attempts import QUERY, by_reroll
from benchmarks.sparse_base import read_rows
from benchmarks.sparse_feed import LeasingFeed, Policies
from consumer.assembly.rollouts import rollout_buffer
from consumer.assembly.training import training_loop
from consumer.publishing.published_policy import Snapshot
from consumer.training.pipeline import Connections
from consumer.training.run_components import RunComponents, RunStart
from consumer.waiting import Patience
from protocol.config.loader import load_config
from protocol.files import rotated_lines
from replay.groups import RolloutGroup
from replay.journal.tables import StepCut
from replay.journal.writer import Journal
from replay.rewards import RewardRecipe

CONFIG = "examples/arithmetic/run.yaml"


@dataclass(frozen=True)
class Arm:
    """Its settings are the best that were tried, on other seeds than the table's; docs/benchmarks.md says how."""

    groups_per_step: int
    learning_rate: float
    settings: tuple[str, ...] = ()


_NO_REPLAY = ("replay.mode=fifo",)
_REPLAY = (
    "replay.mode=signal",
    "replay.min_size=2",
    "replay.max_share=0.75",
    "replay.max_age_versions=64",
    "replay.half_life_versions=16",
)
_NO_REROLLS = ("reroll.max_attempts=0",)
_REROLLS = ("reroll.solved_cooldown_epochs=2",)
ARMS = {
    "plain": Arm(16, 2e-3, _NO_REPLAY + _NO_REROLLS),
    "full": Arm(2, 1e-3, _NO_REPLAY + _NO_REROLLS),
    "full+replay": Arm(4, 1e-3, _REPLAY + _NO_REROLLS),
    "full+rerolls": Arm(2, 1e-3, _NO_REPLAY + _REROLLS),
    "all": Arm(4, 1e-3, _REPLAY + _REROLLS),
}
"""`plain` is GRPO as usual: the next groups as they come, whatever their rewards. The others train groups with signal
only, and take what is not said here from the defaults of the configuration."""

_EFFECTIVE_SHARE = "sampling/importance_sampling_ratio/effective_sample_share"


@dataclass(frozen=True)
class Plan:
    """What is the same for every run of a table."""

    base: str  # folder of the model, with train.jsonl and eval.jsonl
    budget_tokens: int
    evaluations: int
    num_generations: int = 8


@dataclass(frozen=True)
class Case:
    """One run of a table."""

    arm: str
    seed: int
    groups_per_step: int
    learning_rate: float
    extra: tuple[str, ...] = ()  # configuration beside the arm's

    @property
    def name(self) -> str:
        parts = [
            self.arm,
            *(one.replace("=", "_") for one in self.extra),
            f"groups{self.groups_per_step}",
            f"lr{self.learning_rate:g}",
            f"seed{self.seed}",
        ]
        return "-".join(parts)

    @property
    def settings(self) -> list[str]:
        """Its configuration, beside what is the same for every run."""
        return [
            f"seed={self.seed}",
            f"pipeline.groups_per_step={self.groups_per_step}",
            f"trainer.learning_rate={self.learning_rate}",
            *ARMS[self.arm].settings,
            *self.extra,
        ]


class EveryGroup(RewardRecipe):
    """To the buffer, every group has signal."""

    def signal(self, group: RolloutGroup) -> float:
        return 1.0


class HeldOut:
    """Accuracy on held-out rows {"prompt", "answer"}: greedy, and sampled at temperature 1 in expectation, which is the
    mean probability of the right answer. One forward pass and no noise."""

    def __init__(self, sampler: Sampler, rows: Sequence[dict[str, str]]) -> None:
        self._sampler = sampler
        tokenizer = sampler.tokenizer
        self._prompt_length = len(tokenizer(rows[0]["prompt"])["input_ids"])
        whole = [tokenizer(row["prompt"] + row["answer"])["input_ids"] + [tokenizer.eos_token_id] for row in rows]
        longest = max(map(len, whole))
        self._ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in whole])
        self._wanted = self._ids[:, self._prompt_length :]
        self._padding = torch.arange(longest) >= torch.tensor([len(ids) for ids in whole])[:, None]

    @torch.inference_mode()
    def __call__(self, blob: bytes) -> tuple[float, float]:
        """Greedy and expected accuracy."""
        self._sampler.load(blob)
        logits = self._sampler.model(input_ids=self._ids[:, :-1], use_cache=False).logits.float()
        logprobs = logits[:, self._prompt_length - 1 :].log_softmax(dim=-1)
        padding = self._padding[:, self._prompt_length :]
        right = (logprobs.argmax(dim=-1) == self._wanted) | padding
        answer = logprobs.gather(2, self._wanted[:, :, None])[:, :, 0].masked_fill(padding, 0.0).sum(dim=1)
        return right.all(dim=1).float().mean().item(), answer.exp().mean().item()


class MeasuredPolicies(Policies):
    """Measures the policy whenever another share of the tokens was generated."""

    def __init__(self, *args: Any, held_out: HeldOut, every_tokens: int) -> None:
        super().__init__(*args)
        self._held_out = held_out
        self._every_tokens = every_tokens
        self._next = 0
        self.feed: LeasingFeed  # set once it exists
        self.curve: list[tuple[int, int, float, float]] = []  # tokens, steps, greedy and expected accuracy

    def publish(self, step: int, version: int, snapshot: Snapshot, cut: StepCut | None = None) -> None:
        super().publish(step, version, snapshot, cut)
        if self.feed.tokens >= self._next:
            self._next = self.feed.tokens + self._every_tokens
            self.curve.append((self.feed.tokens, step, *self._held_out(self.blob)))


def train(plan: Plan, case: Case) -> dict[str, Any]:
    """Trains one run and returns what came of it."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")  # noqa: S108  the journal commits thousands of times, and durability is not the point
    run_dir = Path(tempfile.mkdtemp(prefix="sparse-", dir=memory if memory.is_dir() else None))
    try:
        return _train(plan, case, run_dir)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _train(plan: Plan, case: Case, run_dir: Path) -> dict[str, Any]:
    started = time.monotonic()
    setup = RunComponents.load(load_config(CONFIG, _overrides(plan, case, run_dir)), [], lambda: False)
    if case.arm == "plain":
        setup = replace(setup, rewards=EveryGroup(setup.rewards.weights))
    sampler = Sampler(setup)
    held_out = HeldOut(sampler, read_rows(Path(plan.base) / "eval.jsonl"))
    with closing(Journal(run_dir / "journal.sqlite")) as journal:
        buffer = rollout_buffer(setup, journal, "bench")
        every = plan.budget_tokens // plan.evaluations
        policies = MeasuredPolicies(buffer, journal, held_out=held_out, every_tokens=every)
        feed = policies.feed = LeasingFeed(setup, sampler, buffer, policies, plan.budget_tokens)
        report = setup.report(buffer.totals, 0, CollectorRegistry())
        patience = Patience(check=lambda: None, say=report.say, stall_timeout_s=600.0)
        loop = training_loop(setup, Connections(feed, policies, report, patience), RunStart(case.name))
        loop.control.publish(0)
        try:
            loop.train()
        finally:
            report.close()
        attempts = by_reroll(journal.query(QUERY))
    steps = rotated_lines.read(run_dir / "steps.jsonl")
    return asdict(case) | {
        "name": case.name,
        "plan": asdict(plan),
        "settings": case.settings,
        "tokens": feed.tokens,
        "steps": len(steps),
        "curve": policies.curve,
        "counts": dict(buffer.totals),
        "attempts": {number: asdict(attempt) for number, attempt in attempts.items()},
        "effective_sample_share": statistics.fmean(step[_EFFECTIVE_SHARE] for step in steps) if steps else None,
        "wall_s": time.monotonic() - started,
    }


def _overrides(plan: Plan, case: Case, run_dir: Path) -> list[str]:
    return [
        f"run_dir={run_dir}",
        f"model.path={plan.base}",
        f"dataset.path={plan.base}/train.jsonl",
        f"sampling.num_generations={plan.num_generations}",
        "pipeline.max_staleness=0",
        "trainer.max_steps=1000000",
        'trainer.save_strategy="no"',
        "observability.progress=false",
        *case.settings,
    ]
