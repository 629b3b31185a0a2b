"""The report of each optimizer step: a progress bar, one line in `steps.jsonl`, and Prometheus metrics.

Guarantee: every optimizer step leaves exactly one line in `RUN_DIR/steps.jsonl`, written when the step ends or, on a full
disk, when there is room; steps that a crash undid leave none. The file and the older one that it replaced, `steps.1.jsonl`,
are bounded (`protocol.runtime.json_lines`): together they have the last hundred thousand steps or more. A metric that a step did
not have keeps its last value; before the first one it is NaN, which no alert takes for 0. docs/corrections.md explains the ratio
statistics.
"""

import logging
import math
import sys
import time
from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tqdm import tqdm

from protocol.runtime import logs
from protocol.runtime.files import ignore_disk_full
from protocol.runtime.json_lines import RotatedLines, encode_line
from replay.advantages import weighted_sums
from replay.batch_selection import GroupStats, TrainingBatch
from replay.credit import CreditRecipe
from replay.groups import RolloutGroup
from replay.lease_ids import LeaseId
from replay.prompt_draws import BY_SIGNAL
from replay.rewards import RewardRecipe
from replay.signal_chances import VERDICTS
from replay.sources import ONE, ONE_ENVIRONMENT, Parts, Sources, total_of

logger = logging.getLogger(__name__)

_RATIO = "sampling/importance_sampling_ratio"
_QUANTILES = {"0.01": f"{_RATIO}/p01", "0.5": f"{_RATIO}/p50", "0.99": f"{_RATIO}/p99"}
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
STEP_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

_GAUGES = {
    "reward": ("reward", "Mean weighted reward of completions since the last step."),
    "reward_std": (
        "reward_std",
        "Standard deviation of rewards since the last step.",
    ),
    "spans/share": ("groups_with_spans_ratio", "Share of groups with rewards of spans."),
    "spans/reward": ("span_reward", "Mean reward of spans (rewards.credit)."),
    "spans/reward_std": ("span_reward_std", "Standard deviation of span rewards."),
    "frac_reward_zero_std": (
        "zero_signal_ratio",
        "Share of groups since the last step with equal rewards.",
    ),
    "completions/mean_length": (
        "completion_length_mean_tokens",
        "Mean length of completions since the last step.",
    ),
    "completions/max_length": (
        "completion_length_max_tokens",
        "Greatest length of completions since the last step.",
    ),
    "completions/clipped_ratio": (
        "completions_truncated_ratio",
        "Share of arrived completions that reached sampling.max_completion_length.",
    ),
    "staleness/mean": ("staleness_mean_versions", "Mean staleness of fresh groups."),
    "staleness/max": ("staleness_max_versions", "Greatest staleness of fresh groups."),
    "staleness/token_mean": (
        "token_staleness_mean_versions",
        "Mean staleness of fresh tokens.",
    ),
    "staleness/newer_token_share": (
        "newer_tokens_ratio",
        "Share of fresh tokens from a newer policy than their group's oldest token.",
    ),
    "replay/share": ("replayed_ratio", "Share of the batch that was replayed."),
    "curriculum/level": ("curriculum_level", "Level of dataset.curriculum, from 0."),
    "curriculum/success_rate": ("curriculum_success_ratio", "Share of successes in its window."),
    "pipeline/max_staleness": (
        "max_staleness_versions",
        "pipeline.max_staleness.",
    ),
    "pipeline/micro_batch_tokens": (
        "micro_batch_tokens",
        "Largest pass of the trainer, with the measured value of `auto`.",
    ),
    f"{_RATIO}/mean": ("importance_ratio_mean", "Mean importance ratio of the tokens, before correction."),
    f"{_RATIO}/max": ("importance_ratio_max", "Greatest importance ratio, before correction."),
    f"{_RATIO}/effective_sample_share": (
        "effective_sample_ratio",
        "Kish's effective sample size over the number of tokens.",
    ),
    f"{_RATIO}/clipped_share": (
        "ratio_clipped_ratio",
        "Share of the tokens whose importance ratio the correction bounds.",
    ),
    f"{_RATIO}/corrected/masked_share": (
        "ratio_masked_ratio",
        "Share of the tokens whose factor the correction sets to 0.",
    ),
    f"{_RATIO}/kl": (
        "sampling_kl_nats",
        "KL divergence per token from the sampler (k1).",
    ),
    "kl": ("reference_kl_nats", "KL divergence per token to the reference model, with trainer.beta."),
    "entropy": ("entropy_nats", "Mean entropy of the policy per token."),
    "distillation/logprob_gain": (
        "teacher_logprob_gain_nats",
        "Mean of the teacher's log-prob minus the policy's, per token.",
    ),
    "ce_loss": ("answer_cross_entropy_nats", "Mean cross-entropy per token of answers (loss.ce_coef)."),
    "distillation/divergence": (
        "teacher_divergence_nats",
        "Mean divergence from teachers per token.",
    ),
    "clip_ratio/region_mean": ("policy_clip_ratio", "Share of the tokens clipped by the loss (PPO's bounds)."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the gradient of the last step, before clipping."),
    "learning_rate": ("learning_rate", "Learning rate, as last logged."),
}

_GAUGES_OF_AN_ENVIRONMENT = {
    "reward": ("reward", "Mean weighted reward by environment."),
    "success_rate": ("success_ratio", "Share of completions above the threshold of failure, by environment."),
}
_GAUGES_OF_A_SOURCE = {
    "reward": ("reward", "Mean weighted reward by source, like `rl_trainer_reward`."),
    "reward_std": ("reward_std", "Standard deviation of rewards by source."),
    "success_rate": ("success_ratio", "Share of completions above the threshold of failure, by source."),
    "frac_reward_zero_std": ("zero_signal_ratio", "Share of groups with equal rewards, by source."),
    "completions/mean_length": ("completion_length_mean_tokens", "Mean length of completions by source."),
    "generation_s": ("generation_seconds", "Time that generation of a group took, mean by source."),
    "batch_share": ("batch_ratio", "Share of the batch, by source."),
}


@dataclass(frozen=True)
class StepRecord:
    """An optimizer step, as the report has it.

    Args:
        step: counted from 1.
        numbers: by TRL's names; a number that the step does not have is left out.
        wait_s: time that the trainer waited for the batch.
        step_s: time since then.
        tokens: sampled tokens in the batch.
    """

    step: int
    numbers: dict[str, float]
    wait_s: float
    step_s: float
    tokens: int


class LearningMetrics:
    """The metrics of steps, which belong to the main thread. `max_staleness` is in versions, as configured; `sources` and
    `environments` are those of the prompts, where there are several."""

    def __init__(
        self,
        registry: CollectorRegistry,
        reward_names: Iterable[str],
        *,
        max_steps: int,
        max_staleness: int,
        sources: Sequence[str] = (),
        environments: Parts = ONE_ENVIRONMENT,
    ) -> None:
        gauge = partial(Gauge, namespace="rl_trainer", registry=registry)
        counter = partial(Counter, namespace="rl_trainer", registry=registry)
        histogram = partial(Histogram, namespace="rl_trainer", registry=registry)
        self._gauges = {key: gauge(name, text) for key, (name, text) in _GAUGES.items()}
        quantiles = gauge("importance_ratio", "Quantiles of the tokens' importance ratios.", ["quantile"])
        self._gauges |= {key: quantiles.labels(quantile) for quantile, key in _QUANTILES.items()}
        rewards = gauge("reward_by_function", "Mean reward by function, unweighted.", ["function"])
        spread = gauge("reward_std_by_function", "Standard deviation of the reward by function.", ["function"])
        for name in reward_names:
            self._gauges |= {f"rewards/{name}/mean": rewards.labels(name), f"rewards/{name}/std": spread.labels(name)}
        for key, (name, text) in _GAUGES_OF_A_SOURCE.items():
            by_source = gauge(f"source_{name}", text, ["source"])
            self._gauges |= {total_of(source, key): by_source.labels(source) for source in sources}
        for key, (name, text) in _GAUGES_OF_AN_ENVIRONMENT.items():
            by_environment = gauge(f"environment_{name}", text, ["environment"])
            self._gauges |= {
                environments.total_of(each, key): by_environment.labels(each) for each in environments.names
            }
        labels = ["source", "verdict"] if sources else ["verdict"]
        weights = gauge("prompt_weight", "Weight of prompts in dataset.sampling=by_signal.", labels)
        for verdict in VERDICTS:
            key = f"{BY_SIGNAL}/{verdict}"
            found: dict[str, tuple[str, ...]] = {total_of(each, key): (each, verdict) for each in sources}
            found = found or {key: (verdict,)}
            self._gauges |= {name: weights.labels(*values) for name, values in found.items()}
        for each in self._gauges.values():
            each.set(math.nan)
        self._gauges["pipeline/max_staleness"].set(max_staleness)
        self._step = gauge("step", "Optimizer steps taken.")
        self._last_step_at = gauge("last_step_timestamp_seconds", "When the last step ended, Unix time; 0 before.")
        gauge("max_steps", "Optimizer steps that the run takes.").set(max_steps)
        text = "Duration of optimizer steps without the wait for rollouts."
        self._step_s = histogram("step_seconds", text, buckets=STEP_BUCKETS_S)
        self._wait_s = counter("wait_seconds", "Time that the trainer has waited for rollouts.")
        self._tokens = counter("tokens_trained", "Completion tokens trained.")
        text = "Staleness of fresh groups when their batch was cut."
        self._staleness = histogram("staleness_versions", text, buckets=STALENESS_BUCKETS)
        self._nonfinite = counter("nonfinite_steps", "Steps whose loss or gradient norm was NaN or infinite.")

    def batch(self, staleness: Iterable[int]) -> None:
        """A batch was cut; `staleness` of its groups that are trained for the first time."""
        for versions in staleness:
            self._staleness.observe(versions)

    def step(self, record: StepRecord, now: float) -> None:
        """Show a step that ended `now`, in Unix time."""
        self._step.set(record.step)
        self._last_step_at.set(now)
        self._wait_s.inc(record.wait_s)
        self._step_s.observe(record.step_s)
        self._tokens.inc(record.tokens)
        self._set(record.numbers)
        self._nonfinite.inc(not all(math.isfinite(record.numbers.get(key, 0.0)) for key in ("loss", "grad_norm")))

    def logged(self, numbers: Mapping[str, float]) -> None:
        """Take the learning rate from what transformers logged."""
        self._set({key: numbers[key] for key in ("learning_rate",) if key in numbers})

    def _set(self, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            if key in self._gauges:
                self._gauges[key].set(value)


_MOST_LOGGED = 64  # names of numbers that reward functions log, in a step
_MAX_BYTES = 256 * 2**20  # of one file; a step's line has some 2.5 kB


def batch_metrics(
    batch: TrainingBatch,
    version: int,
    recipe: RewardRecipe,
    names: Sequence[str],
    sources: Sources = ONE,
) -> dict[str, float]:
    """Numbers about the rollouts of one step, under TRL's names where TRL has the number.

    Rewards and lengths are of everything that arrived since the last step, so that they describe the policy and not the
    selection for training; staleness is of the groups that are trained for the first time, against `version`, the policy
    that cut them, and of a group that of its oldest token; replayed groups have an age of their own. Spans are of all groups
    of the batch. Where there are several `sources` each has numbers of its own.
    """
    arrivals = batch.arrivals or [GroupStats.of(group) for group in batch.groups]
    rewards = np.concatenate([arrival.rewards for arrival in arrivals])
    lengths = np.concatenate([arrival.lengths for arrival in arrivals])
    ages = [version - group.policy_version for group in batch.groups]
    staleness, replayed = ages[: batch.num_fresh], ages[batch.num_fresh :]
    fresh = batch.groups[: batch.num_fresh]
    sampled = np.concatenate([group.is_sampled for group in fresh])
    versions = np.concatenate([group.versions for group in fresh])[sampled]
    oldest = np.repeat([group.policy_version for group in fresh], [group.num_tokens for group in fresh])[sampled]
    metrics = _arrival_metrics(arrivals, recipe) | {
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.concatenate([arrival.truncated for arrival in arrivals]).mean()),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(max(staleness)),
        "staleness/token_mean": float(version - versions.mean()),
        "staleness/newer_token_share": float((versions > oldest).mean()),
        "replay/share": len(replayed) / len(ages),
    }
    if batch.curriculum is not None:
        level, rate = batch.curriculum
        metrics |= {"curriculum/level": level, "curriculum/success_rate": rate}
    metrics |= batch.prompt_weights
    if replayed:
        metrics |= {"replay/age/mean": float(np.mean(replayed)), "replay/age/max": float(max(replayed))}
    for column, name in enumerate(names):
        values = rewards[:, column][~np.isnan(rewards[:, column])]
        if len(values):
            metrics[f"rewards/{name}/mean"] = float(values.mean())
            metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    metrics |= _source_metrics(batch, arrivals, recipe, sources) | _logged_metrics(arrivals)
    return metrics | (span_metrics(batch.groups, recipe.credit) if recipe.credit else {})


def _logged_metrics(arrivals: Sequence[GroupStats]) -> dict[str, float]:
    """Return the means of what reward functions logged, over the groups in which they did, of the first `_MOST_LOGGED` names."""
    numbers: dict[str, list[float]] = {}
    for arrival in arrivals:
        for name, value in arrival.metrics.items():
            if name in numbers or len(numbers) < _MOST_LOGGED:
                numbers.setdefault(name, []).append(value)
    return {f"logged/{name}": float(np.mean(values)) for name, values in numbers.items()}


def _arrival_metrics(arrivals: Sequence[GroupStats], recipe: RewardRecipe) -> dict[str, float]:
    total = weighted_sums(np.concatenate([arrival.rewards for arrival in arrivals]), recipe.weights)
    total = total[~np.isnan(total)]
    return {
        "reward": float(total.mean()) if len(total) else float("nan"),
        "reward_std": float(total.std(ddof=1)) if len(total) > 1 else 0.0,
        "frac_reward_zero_std": sum(arrival.outcome == "no_signal" for arrival in arrivals) / len(arrivals),
        "completions/mean_length": float(np.concatenate([arrival.lengths for arrival in arrivals]).mean()),
    }


def _source_metrics(
    batch: TrainingBatch, arrivals: Sequence[GroupStats], recipe: RewardRecipe, sources: Sources
) -> dict[str, float]:
    """Return numbers by source and by environment."""
    found: dict[str, float] = {}
    for parts in sources.parts:
        found |= _part_metrics(batch, arrivals, recipe, parts)
    return found


def _part_metrics(
    batch: TrainingBatch, arrivals: Sequence[GroupStats], recipe: RewardRecipe, parts: Parts
) -> dict[str, float]:
    """Return numbers of each part: of what arrived, where anything did, and the share of the batch, replayed groups included."""

    def part_of(lease_id: str) -> str:
        return parts.name_of(LeaseId.parse(lease_id).key.prompt_id)

    found: dict[str, float] = {}
    in_batch = Counts(part_of(group.lease_id) for group in batch.groups)
    for name in parts.names:
        own = [arrival for arrival in arrivals if part_of(arrival.lease_id) == name]
        numbers = _arrival_metrics(own, recipe) if own else {}
        if own:
            numbers["generation_s"] = sum(arrival.generation_s for arrival in own) / len(own)
        grades = [arrival.grade for arrival in own if arrival.grade is not None]
        if scored := sum(grade.num_scored for grade in grades):
            numbers["success_rate"] = sum(grade.num_successes for grade in grades) / scored
        numbers["batch_share"] = in_batch[name] / len(batch.groups)
        found |= {parts.total_of(name, what): value for what, value in numbers.items() if not math.isnan(value)}
    return found


def span_metrics(groups: Sequence[RolloutGroup], credit: CreditRecipe) -> dict[str, float]:
    """Return the share of groups with rewards of spans, or of turns where the recipe adds these, and mean and deviation."""
    of_groups = [credit.spans(group).rewards for group in groups]
    metrics = {"spans/share": sum(len(rewards) > 0 for rewards in of_groups) / len(groups)}
    if len(rewards := np.concatenate(of_groups)):
        metrics["spans/reward"] = float(rewards.mean())
        metrics["spans/reward_std"] = float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
    return metrics


def success_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the share of successes among all scored completions so far, by the attempt at their prompt: 1 is the first attempt,
    2 the first reroll."""
    scored = {name.removesuffix("_scored"): count for name, count in counts.items() if name.endswith("_scored")}
    return {
        f"success_rate/{attempt}": counts[f"{attempt}_successes"] / count for attempt, count in scored.items() if count
    }


class StepReport:
    """Writes `steps.jsonl`, moves the bar or says a line, sets the metrics."""

    def __init__(
        self,
        run_dir: Path,
        counts: Mapping[str, int],
        metrics: LearningMetrics,
        *,
        max_steps: int,
        first_step: int,
        show_bar: bool,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = RotatedLines(run_dir / "steps.jsonl", _MAX_BYTES)
        self._file.forget_after(first_step)  # steps that were trained, but are not in the checkpoint
        self._unwritten: list[bytes] = []
        self._counts = counts
        self._metrics = metrics
        self._max_steps = max_steps
        self._as_records = logs.structured()
        self._show_lines = show_bar and (self._as_records or not sys.stderr.isatty())
        self._bar = tqdm(
            total=max_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not show_bar or self._show_lines,
        )

    def batch(self, staleness: list[int]) -> None:
        """A batch was cut; `staleness` of its groups that are trained for the first time, in versions."""
        self._metrics.batch(staleness)

    def logged(self, numbers: Mapping[str, float]) -> None:
        """Take the numbers that transformers logged of a step."""
        self._metrics.logged(numbers)

    def step(self, record: StepRecord) -> None:
        """Write the line of a step, set its metrics, and move the bar."""
        now, step, numbers = time.time(), record.step, record.numbers
        spent = {"wait_s": record.wait_s, "step_s": record.step_s, "tokens": record.tokens}
        self._metrics.step(record, now)
        counts = dict(self._counts)  # a copy: the intake's thread adds names to it
        totals = {**success_rates(counts), "counts": counts}
        self._unwritten.append(f"{encode_line({'step': step, 't': now} | spent | numbers | totals)}\n".encode())
        self._write()
        whole_s = max(1e-9, record.wait_s + record.step_s)
        fields = spent | {
            "step": step,
            "max_steps": self._max_steps,
            "reward": numbers["reward"],
            "staleness": numbers["staleness/mean"],
            "tokens_per_s": record.tokens / whole_s,
            "wait_share": record.wait_s / whole_s,
        }
        gain = numbers.get("distillation/logprob_gain", math.nan)
        learnt = {"reward": numbers["reward"], "teacher": gain}
        shown = {name: f"{value:.3f}" for name, value in learnt.items() if not math.isnan(value)} | {
            "staleness": f"{fields['staleness']:.2f}",
            "tok/s": f"{fields['tokens_per_s']:.0f}",
            "wait": f"{fields['wait_share']:.0%}",
        }
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix(shown, refresh=False)
        if self._show_lines:
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"step {step}/{self._max_steps}  {text}", **fields)

    def say(self, text: str, **fields: Any) -> None:
        """A message that does not tear the bar; a record with these fields where logs are JSON."""
        if self._as_records:
            logger.info("%s", text, extra={"fields": fields})
        else:
            tqdm.write(text, file=sys.stderr)
            logs.note(text)

    def close(self) -> None:
        self._bar.close()
        self._write()

    def _write(self) -> None:
        with ignore_disk_full():
            while self._unwritten:
                self._file.append(self._unwritten[0])
                del self._unwritten[0]
