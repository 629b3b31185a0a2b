"""What a producer does, as Prometheus metrics.

Guarantee: totals and stages are read from `Counters`, `Workload` and `Delivery` when they are scraped; vLLM's own metrics of the
engine appear under vLLM's names (`vllm:...`).
"""

from collections.abc import Callable, Iterable, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Info

from producer.interfaces import FAILURES, Failure
from producer.state import Counters, Situation
from protocol import __version__
from protocol.service.metrics import Readings, Reexport

GENERATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
REWARD_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)
SWAP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

_TOTALS: dict[str, tuple[str, str]] = {
    "groups": ("rl_producer_groups_generated_total", "Groups generated and scored."),
    "failed": ("rl_producer_leases_failed_total", "Leases answered with a refusal."),
    "timed_out": ("rl_producer_leases_timed_out_total", "Of these, those that ran into their deadline."),
    "abandoned": ("rl_producer_leases_abandoned_total", "Leases that the trainer did not want any more."),
    "settled": ("rl_producer_groups_settled_total", "Groups that the trainer acknowledged."),
    "tokens": ("rl_producer_completion_tokens_total", "Tokens generated."),
    "prompt_tokens": ("rl_producer_prompt_tokens_total", "Tokens of prompts, once per group."),
    "completions": ("rl_producer_completions_total", "Completions generated."),
    "cut": (
        "rl_producer_completions_cut_total",
        "Times that a completion was cut at a swap and went on under the new policy (swap.in_flight: continue).",
    ),
    "restarted": (
        "rl_producer_groups_restarted_total",
        "Groups that began again at a swap (swap.in_flight: restart).",
    ),
    "dropped_tokens": ("rl_producer_tokens_dropped_total", "Tokens that restarts threw away."),
    "truncated": ("rl_producer_completions_truncated_total", "Completions that reached max_completion_length."),
    "turns": ("rl_producer_turns_total", "Turns of the policy in episodes with an environment."),
    "tool_calls": ("rl_producer_tool_calls_total", "Tool calls that the policy asked for."),
    "failed_tool_calls": (
        "rl_producer_tool_calls_failed_total",
        "Of these, those that the policy was told an error for.",
    ),
    "failed_episodes": (
        "rl_producer_episodes_failed_total",
        "Episodes that are not scored, because their environment failed or they took too long.",
    ),
}


class ProducerMetrics:
    """Timings that are told as they happen; `watch` adds all that is read."""

    def __init__(self, registry: CollectorRegistry, reward_names: Sequence[str] = ()) -> None:
        self._registry = registry
        self.generation_s = Histogram(
            "rl_producer_generation_seconds", "Time of a group in the engine.",
            buckets=GENERATION_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.reward_s = Histogram(
            "rl_producer_reward_seconds", "Time of all reward functions over a group.",
            buckets=REWARD_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._call_s = Histogram(
            "rl_producer_reward_call_seconds", "Time of one call of a reward function, without waiting for a worker.",
            ["function"], buckets=REWARD_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._missing = Counter(
            "rl_producer_rewards_failed_total",
            "Completions that a reward function failed to score, after its retries.",
            ["function", "reason"], registry=registry,
        )  # fmt: skip
        for name in reward_names:
            self._call_s.labels(name)
            for reason in FAILURES:
                self._missing.labels(name, reason)
        self.swap_s = Histogram(
            "rl_producer_swap_seconds", "From the announcement of a policy version until requests start on it.",
            buckets=SWAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.load_s = Histogram(
            "rl_producer_adapter_load_seconds", "Of these, from the last byte on: verifying, unpacking and loading.",
            buckets=SWAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._lengths = Histogram(
            "rl_producer_completion_length_tokens", "Length of completions.",
            buckets=LENGTH_BUCKETS_TOKENS, registry=registry,
        )  # fmt: skip

    def generated(self, lengths: Iterable[int]) -> None:
        """Of completions, in sampled tokens."""
        for length in lengths:
            self._lengths.observe(length)

    def reward_called(self, function: str, seconds: float) -> None:
        self._call_s.labels(function).observe(seconds)

    def reward_failed(self, function: str, reason: Failure, num_completions: int) -> None:
        self._missing.labels(function, reason).inc(num_completions)

    def watch_agent_program(self, restarts: Callable[[], int]) -> None:
        Readings(self._registry).counter(
            "rl_producer_environment_restarts_total",
            "Times that the agent program of an environment (`verifiers`, `nemo_gym`) was started again because it had ended.",
            restarts,
        )

    def watch(
        self,
        name: str,
        counters: Counters,
        look: Callable[[], Situation],
        group_limit: Callable[[], int],
    ) -> None:
        Info("rl_producer", "This producer and its release.", registry=self._registry).info(
            {"producer": name, "release": __version__}
        )
        readings = Readings(self._registry)
        for field, (metric, text) in _TOTALS.items():
            readings.counter(metric, text, lambda field=field: getattr(counters, field))  # type: ignore[misc]
        readings.counters(
            "rl_producer_swaps_total",
            "Policy versions that went live, or that were refused: not loadable, or not computed as the trainer does.",
            "outcome",
            lambda: {"live": counters.swaps, "refused": counters.failed_swaps},
        )
        readings.gauge(
            "rl_producer_policy_version",
            "Policy version that requests start on; -1 while none.",
            lambda: counters.policy_version,
        )
        readings.gauges("rl_producer_leases", "Leases in hand, by stage.", "stage", lambda: _stages(look()))
        readings.gauge(
            "rl_producer_group_limit",
            "Groups that may be in the engine at once; it falls while vLLM preempts more often than once per completion.",
            group_limit,
        )
        readings.counter(
            "rl_producer_busy_seconds_total", "Time with a request in the engine.", lambda: look().workload.busy_s
        )
        readings.counter(
            "rl_producer_idle_seconds_total", "Time connected to a trainer without one.", lambda: counters.idle_s
        )
        readings.gauge("rl_producer_connected", "1 while connected to a trainer.", lambda: look().delivery.connected)
        readings.gauge(
            "rl_producer_unacked_bytes",
            "Bytes of groups not acknowledged yet.",
            lambda: look().delivery.unacked_bytes,
        )
        readings.gauge(
            "rl_producer_paused",
            "1 while generation pauses for transport.max_unacked_bytes.",
            lambda: look().delivery.full,
        )
        readings.gauges(
            "rl_producer_reward_workers",
            "Reward worker processes.",
            "state",
            lambda: _workers(look()),
        )
        Reexport(self._registry, prometheus_client.REGISTRY, "vllm:")


def _stages(now: Situation) -> dict[str, int]:
    work = now.workload
    return {
        "waiting": len(work.waiting_floors),
        "generating": work.generating,
        "scoring": work.scoring,
        "unacked": now.delivery.unacked,
    }


def _workers(now: Situation) -> dict[str, int]:
    return {"busy": now.num_workers - now.num_idle_workers, "idle": now.num_idle_workers}
