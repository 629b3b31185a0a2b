"""What the last optimizer step said, as Prometheus metrics.

Guarantee: a number that a step did not have keeps its last value; before the first one it is NaN, which no alert takes for 0.
docs/algorithms.md says what the ratio statistics mean.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_RATIO = "sampling/importance_sampling_ratio"
_QUANTILES = {"0.01": f"{_RATIO}/p01", "0.5": f"{_RATIO}/p50", "0.99": f"{_RATIO}/p99"}
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
STEP_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

_GAUGES = {
    "reward": ("reward", "Mean weighted sum of rewards of the completions that arrived since the last step."),
    "reward_std": (
        "reward_std",
        "Standard deviation of the rewards of the completions that arrived since the last step.",
    ),
    "frac_reward_zero_std": (
        "zero_signal_ratio",
        "Share of the groups that arrived since the last step whose rewards were all equal.",
    ),
    "completions/mean_length": (
        "completion_length_mean_tokens",
        "Mean length of the completions that arrived since the last step.",
    ),
    "completions/max_length": (
        "completion_length_max_tokens",
        "Greatest length of the completions that arrived since the last step.",
    ),
    "completions/clipped_ratio": (
        "completions_truncated_ratio",
        "Share of the arrived completions that reached sampling.max_completion_length.",
    ),
    "staleness/mean": ("staleness_mean_versions", "Mean staleness of the groups trained for the first time."),
    "staleness/max": ("staleness_max_versions", "Greatest staleness of the groups trained for the first time."),
    "staleness/token_mean": (
        "token_staleness_mean_versions",
        "Mean staleness of the tokens trained for the first time; that of a group is its oldest token's.",
    ),
    "staleness/newer_token_share": (
        "newer_tokens_ratio",
        "Share of the tokens trained for the first time that a newer policy sampled than their group's oldest.",
    ),
    "replay/share": ("replayed_ratio", "Share of the batch that was replayed."),
    "pipeline/max_staleness": (
        "max_staleness_versions",
        "Staleness within which prompts are leased now: pipeline.max_staleness, or what `auto` has come to.",
    ),
    "pipeline/micro_batch_tokens": (
        "micro_batch_tokens",
        "Tokens that a pass of the trainer may have: pipeline.trainer_tokens_per_micro_batch, or what `auto` has come to.",
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
        "KL divergence per token between the policy that sampled and the one that is trained (estimator k1).",
    ),
    "kl": ("reference_kl_nats", "KL divergence per token to the reference model; NaN while trainer.beta is 0."),
    "entropy": ("entropy_nats", "Mean entropy of the policy per token."),
    "clip_ratio/region_mean": ("policy_clip_ratio", "Share of the tokens clipped by the loss (PPO's bounds)."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the gradient of the last step, before clipping."),
    "learning_rate": ("learning_rate", "Learning rate, as last logged."),
}


class LearningMetrics:
    """Belongs to the main thread. `max_staleness` is in versions, as configured."""

    def __init__(
        self, registry: CollectorRegistry, reward_names: Iterable[str], *, max_steps: int, max_staleness: int
    ) -> None:
        gauge = partial(Gauge, namespace="rl_trainer", registry=registry)
        counter = partial(Counter, namespace="rl_trainer", registry=registry)
        histogram = partial(Histogram, namespace="rl_trainer", registry=registry)
        self._gauges = {key: gauge(name, text) for key, (name, text) in _GAUGES.items()}
        quantiles = gauge("importance_ratio", "Quantiles of the importance ratios of the tokens.", ["quantile"])
        self._gauges |= {key: quantiles.labels(quantile) for quantile, key in _QUANTILES.items()}
        rewards = gauge("reward_by_function", "Mean reward by function, unweighted.", ["function"])
        spread = gauge("reward_std_by_function", "Standard deviation of the reward by function.", ["function"])
        for name in reward_names:
            self._gauges |= {f"rewards/{name}/mean": rewards.labels(name), f"rewards/{name}/std": spread.labels(name)}
        for each in self._gauges.values():
            each.set(math.nan)
        self._gauges["pipeline/max_staleness"].set(max_staleness)
        self._step = gauge("step", "Optimizer steps taken.")
        self._last_step_at = gauge("last_step_timestamp_seconds", "When the last step ended, Unix time; 0 before.")
        gauge("max_steps", "Optimizer steps that the run takes.").set(max_steps)
        text = "Duration of optimizer steps, without the wait for rollouts, with the publication."
        self._step_s = histogram("step_seconds", text, buckets=STEP_BUCKETS_S)
        self._wait_s = counter("wait_seconds", "Time that the trainer has waited for rollouts.")
        self._tokens = counter("tokens_trained", "Completion tokens trained.")
        text = "Staleness of the groups trained for the first time, when their batch was cut."
        self._staleness = histogram("staleness_versions", text, buckets=STALENESS_BUCKETS)
        self._nonfinite = counter("nonfinite_steps", "Steps whose loss or gradient norm was NaN or infinite.")

    def batch(self, staleness: Iterable[int]) -> None:
        """A batch was cut; `staleness` of its groups that are trained for the first time."""
        for versions in staleness:
            self._staleness.observe(versions)

    def step(
        self, step: int, now: float, numbers: Mapping[str, float], *, wait_s: float, step_s: float, tokens: int
    ) -> None:
        """Optimizer step `step` ended; `numbers` as in `steps.jsonl`, `now` in Unix time."""
        self._step.set(step)
        self._last_step_at.set(now)
        self._wait_s.inc(wait_s)
        self._step_s.observe(step_s)
        self._tokens.inc(tokens)
        self._set(numbers)
        self._nonfinite.inc(not all(math.isfinite(numbers.get(key, 0.0)) for key in ("loss", "grad_norm")))

    def logged(self, numbers: Mapping[str, float]) -> None:
        """What transformers logged; only there is the learning rate."""
        self._set({key: numbers[key] for key in ("learning_rate",) if key in numbers})

    def _set(self, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            if key in self._gauges:
                self._gauges[key].set(value)
