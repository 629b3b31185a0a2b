"""What a producer does, as Prometheus metrics.

Guarantee: totals and stages are read from `Counters`, `Workload` and `Delivery` when they are scraped; vLLM's own metrics of the
engine appear under vLLM's names (`vllm:...`).
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Protocol, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Info

from producer.interfaces import Failure
from producer.state import PolicyCounts, Situation
from protocol import __version__
from protocol.runtime.metrics import Readings, Reexport

GENERATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
REWARD_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)
SWAP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

_NUMBERS: dict[str, tuple[str, Callable[[Situation], float]]] = {
    "rl_producer_policy_version": (
        "Policy version that requests start on; -1 while none.",
        lambda now: now.counters.policy_version,
    ),
    "rl_producer_group_limit": (
        "Groups that may be in the engine at once; it falls while vLLM preempts more often than once per completion.",
        lambda now: now.group_limit,
    ),
    "rl_producer_busy_seconds_total": ("Time with a request in the engine.", lambda now: now.workload.busy_s),
    "rl_producer_idle_seconds_total": (
        "Time connected to a trainer without one, the engine being awake.",
        lambda now: now.counters.idle_s,
    ),
    "rl_producer_asleep": (
        "1 while the engine sleeps in the trainer's turn on the GPU (pipeline.gpu: turns).",
        lambda now: now.counters.asleep_in >= 0,
    ),
    "rl_producer_connected": ("1 while connected to a trainer.", lambda now: now.delivery.connected),
    "rl_producer_unacked_bytes": ("Bytes of groups not acknowledged yet.", lambda now: now.delivery.unacked_bytes),
    "rl_producer_paused": ("1 while generation pauses for transport.max_unacked_bytes.", lambda now: now.delivery.full),
}


class PolicySharing(Protocol):
    @property
    def counts(self) -> PolicyCounts: ...

    @property
    def relayed_bytes(self) -> int: ...


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
            for reason in get_args(Failure):
                self._missing.labels(name, reason)
        self.swap_s = Histogram(
            "rl_producer_swap_seconds", "From the announcement of a policy version until requests start on it.",
            buckets=SWAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.load_s = Histogram(
            "rl_producer_adapter_load_seconds", "Of these, from the last byte on: verifying, unpacking and loading.",
            buckets=SWAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.lengths = Histogram(
            "rl_producer_completion_length_tokens", "Length of completions.",
            buckets=LENGTH_BUCKETS_TOKENS, registry=registry,
        )  # fmt: skip

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

    def watch(self, name: str, look: Callable[[], Situation], sharing: PolicySharing) -> None:
        """`look` is called at every scrape, and now."""
        Info("rl_producer", "This producer and its release.", registry=self._registry).info(
            {"producer": name, "release": __version__}
        )
        readings, counters = Readings(self._registry), look().counters
        for total in fields(counters):
            if total.metadata:
                readings.counter(
                    total.metadata["metric"], total.metadata["text"], partial(getattr, counters, total.name)
                )
        for metric, (text, read) in _NUMBERS.items():
            add = readings.counter if metric.endswith("_total") else readings.gauge
            add(metric, text, lambda read=read: read(look()))  # type: ignore[misc]
        readings.counters(
            "rl_producer_swaps_total",
            "Policy versions that went live, or that were refused: not loadable, or not computed as the trainer does.",
            "outcome",
            lambda: {"live": counters.swaps, "refused": counters.failed_swaps},
        )
        readings.counters(
            "rl_producer_policy_downloads_total",
            "Policies that arrived, by source: the trainer's file on this host, the cache of this host, a relay, the trainer.",
            "source",
            lambda: sharing.counts.downloads,
        )
        readings.counters(
            "rl_producer_relays_left_total",
            "Relays that were left for the next source: they had none to give, said nothing, were slow, or sent a wrong policy.",
            "reason",
            lambda: sharing.counts.left,
        )
        readings.counter(
            "rl_producer_relayed_bytes_total",
            "Bytes of policies handed on to other hosts.",
            lambda: sharing.relayed_bytes,
        )
        readings.gauges("rl_producer_leases", "Leases in hand, by stage.", "stage", lambda: _stages(look()))
        readings.gauges("rl_producer_reward_workers", "Reward worker processes.", "state", lambda: _workers(look()))
        Reexport(self._registry, prometheus_client.REGISTRY, "vllm:")


def _stages(now: Situation) -> dict[str, int]:
    work = now.workload
    waiting = len(work.waiting_floors)
    return {"waiting": waiting, "generating": work.generating, "scoring": work.scoring, "unacked": now.delivery.unacked}


def _workers(now: Situation) -> dict[str, int]:
    return {"busy": now.num_workers - now.num_idle_workers, "idle": now.num_idle_workers}
