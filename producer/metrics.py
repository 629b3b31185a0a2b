"""Prometheus metrics of a producer.

Guarantee: totals and stages are read from `Counters`, `Workload` and `Delivery` when they are scraped; vLLM's own metrics of the
engine appear under vLLM's names (`vllm:...`).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Info

from producer.engine_contract import UNTOLD, EngineSteps
from protocol import __version__
from protocol.runtime.metrics import Readings, Reexport


def _total(metric: str, text: str) -> Any:
    return field(default=0, metadata={"metric": metric, "text": text})


class Comparison(NamedTuple):
    """The change of one version since a reference, which is the base or a version proved before.

    `moved` is the trainer's change of log-probs, `noise` the engine's minus the trainer's, root mean squares in nats. `lack`
    estimates the part of the change that the engine lacks, and `bound` is the largest that noise explains. `share` is the
    smallest lack that would be refused: above 1 not even an engine that serves the reference is.
    """

    moved: float
    noise: float
    lack: float
    bound: float
    share: float

    @property
    def is_refused(self) -> bool:
        return abs(self.lack) > self.bound


class Verdict(NamedTuple):
    """A judgement of a version: why it is refused ("": it is not), the root mean square of engine minus trainer in nats, and
    what the references showed, by name."""

    refusal: str
    difference: float
    comparisons: dict[str, Comparison]


@dataclass
class Counters:
    """Totals since the producer started, and the version loaded. Each has one writer; any thread may read them."""

    policy_version: int = -1
    tokens: int = _total("rl_producer_completion_tokens_total", "Tokens generated.")
    prompt_tokens: int = _total("rl_producer_prompt_tokens_total", "Tokens of prompts, once per group.")
    completions: int = _total("rl_producer_completions_total", "Completions generated.")
    truncated: int = _total(
        "rl_producer_completions_truncated_total", "Completions that reached max_completion_length."
    )
    cut: int = _total(
        "rl_producer_completions_cut_total",
        "Completions that went on under a new policy (swap.in_flight: continue).",
    )
    restarted: int = _total(
        "rl_producer_groups_restarted_total", "Groups that began again at a swap (swap.in_flight: restart)."
    )
    outdated: int = _total(
        "rl_producer_groups_outdated_total",
        "Groups ended during generation because they had become too old.",
    )
    dropped_tokens: int = _total("rl_producer_tokens_dropped_total", "Tokens that restarts threw away.")
    turns: int = _total("rl_producer_turns_total", "Turns of the policy in episodes with an environment.")
    tool_calls: int = _total("rl_producer_tool_calls_total", "Tool calls that the policy asked for.")
    failed_tool_calls: int = _total(
        "rl_producer_tool_calls_failed_total", "Tool calls that returned an error to the policy."
    )
    failed_episodes: int = _total(
        "rl_producer_episodes_failed_total",
        "Episodes that failed or took too long.",
    )
    branched_groups: int = _total("rl_producer_groups_branched_total", "Groups that branched from a trunk.")
    trunk_tokens: int = _total("rl_producer_trunk_tokens_total", "Tokens of trunks, without prompts.")
    trunk_saved_tokens: int = _total(
        "rl_producer_trunk_tokens_saved_total", "Tokens that completions share and did not sample."
    )
    groups: int = _total("rl_producer_groups_generated_total", "Groups generated and scored.")
    failed: int = _total("rl_producer_leases_failed_total", "Leases answered with a refusal.")
    timed_out: int = _total("rl_producer_leases_timed_out_total", "Leases refused at their deadline.")
    swaps: int = 0
    failed_swaps: int = 0
    refused_version: int = -1  # the newest that failed, until a newer one is live
    refusal: str = ""
    num_refused: int = 0  # versions in a row, up to that one, that were refused for good; 0: that one is tried again
    verdict: Verdict | None = None  # of the last version that behaved as the trainer says
    survival: dict[str, float] = field(default_factory=dict)  # of the last update, by kind of module
    abandoned: int = _total("rl_producer_leases_abandoned_total", "Leases that the trainer took back.")
    settled: int = _total("rl_producer_groups_settled_total", "Groups that the trainer acknowledged.")
    idle_s: float = 0.0  # connected without a request in the engine, which is awake
    asleep_in: int = -1  # the trainer's turn on the GPU in which the engine sleeps; -1: it does not
    asleep_s: float = _total("rl_producer_asleep_seconds_total", "Time that the engine slept in the trainer's turns.")


@dataclass
class PolicyCounts:
    """Counts of downloads by source, and of relays left by reason. Any thread may count and read."""

    downloads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("file", "cache", "relay", "trainer"), 0))
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("missing", "silent", "slow", "wrong"), 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_download(self, source: str) -> None:
        with self._lock:
            self.downloads[source] += 1

    def count_left(self, reason: str) -> None:
        with self._lock:
            self.left[reason] += 1


@dataclass(frozen=True)
class Workload:
    """Leases in work by stage."""

    waiting_floors: tuple[int, ...]  # one policy floor per lease that waits for that version, or for room in the engine
    generating: int
    scoring: int
    busy_s: float  # time with a request in the engine, since the producer started
    with_agents: int = 0  # of those that are generating
    takes_leases: bool = True  # False while the engine cannot generate


@dataclass(frozen=True)
class Delivery:
    """Connection of the link and the groups that it holds."""

    connected: bool
    heard_ago_s: float
    held: int
    unacked: int
    unacked_bytes: int
    full: bool


@dataclass(frozen=True)
class Situation:
    """State of a producer at one moment."""

    counters: Counters
    workload: Workload
    delivery: Delivery
    completion_limit: int
    num_workers: int
    num_idle_workers: int
    steps: EngineSteps = UNTOLD


GENERATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
REWARD_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)
SWAP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

_NUMBERS: dict[str, tuple[str, Callable[[Situation], float | None]]] = {
    "rl_producer_policy_version": (
        "Policy version that requests start on; -1 while none.",
        lambda now: now.counters.policy_version,
    ),
    "rl_producer_completion_limit": (
        "Completions that may be in the engine at once; falls while vLLM preempts.",
        lambda now: now.completion_limit,
    ),
    "rl_producer_busy_seconds_total": ("Time with a request in the engine.", lambda now: now.workload.busy_s),
    "rl_producer_idle_seconds_total": (
        "Time connected to a trainer, awake, without a request in the engine.",
        lambda now: now.counters.idle_s,
    ),
    "rl_producer_engine_steps_total": ("Steps of the engine.", lambda now: now.steps.number),
    "rl_producer_engine_step_tokens_total": (
        "Tokens of engine steps.",
        lambda now: now.steps.tokens,
    ),
    "rl_producer_engine_step_sequences_total": (
        "Sequences of engine steps, added up.",
        lambda now: now.steps.sequences,
    ),
    "rl_producer_engine_graph_steps_total": (
        "Engine steps with a CUDA graph.",
        lambda now: now.steps.with_graph,
    ),
    "rl_producer_asleep": (
        "1 while the engine sleeps in the trainer's turn.",
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
    """Metrics that are observed as events happen; `watch` adds those that are read at the scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        reward_names: Sequence[str] = (),
        reward_failures: Sequence[str] = (),
        teachers: Sequence[str] = (),
    ) -> None:
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
            "rl_producer_reward_call_seconds", "Time of one call of a reward function.",
            ["function"], buckets=REWARD_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._missing = Counter(
            "rl_producer_rewards_failed_total",
            "Completions that a reward function failed to score, after its retries.",
            ["function", "reason"], registry=registry,
        )  # fmt: skip
        for name in reward_names:
            self._call_s.labels(name)
            for reason in reward_failures:
                self._missing.labels(name, reason)
        self._teacher_s = Histogram(
            "rl_producer_teacher_seconds", "Time of one request to a teacher.",
            ["teacher"], buckets=REWARD_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._teacher_failures = Counter(
            "rl_producer_teacher_failures_total", "Completions that a teacher failed to score.",
            ["teacher"], registry=registry,
        )  # fmt: skip
        for name in teachers:
            self._teacher_s.labels(name)
            self._teacher_failures.labels(name)
        self.swap_s = Histogram(
            "rl_producer_swap_seconds", "From the announcement of a policy version until requests start on it.",
            buckets=SWAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.load_s = Histogram(
            "rl_producer_adapter_load_seconds", "Part of swap_seconds after the last byte: verifying, unpacking and loading.",
            buckets=SWAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.lengths = Histogram(
            "rl_producer_completion_length_tokens", "Length of completions.",
            buckets=LENGTH_BUCKETS_TOKENS, registry=registry,
        )  # fmt: skip

    def reward_called(self, function: str, seconds: float) -> None:
        self._call_s.labels(function).observe(seconds)

    def reward_failed(self, function: str, reason: str, num_completions: int) -> None:
        self._missing.labels(function, reason).inc(num_completions)

    def teacher_called(self, teacher: str, seconds: float) -> None:
        self._teacher_s.labels(teacher).observe(seconds)

    def teacher_failed(self, teacher: str) -> None:
        self._teacher_failures.labels(teacher).inc()

    def watch_agent_program(self, restarts: Callable[[], int]) -> None:
        Readings(self._registry).counter(
            "rl_producer_environment_restarts_total",
            "Restarts of the agent program of an environment.",
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
            "Policy versions that went live or were refused.",
            "outcome",
            lambda: {"live": counters.swaps, "refused": counters.failed_swaps},
        )
        for metric, text, part in _COMPARED:
            readings.gauges(metric, text, "reference", partial(_compared, counters, part))
        readings.gauges(
            "rl_producer_merged_update_share",
            "Fraction of the policy's update that rounding left in merged weights, by kind of module (docs/swap-proof.md).",
            "module",
            lambda: counters.survival,
        )
        readings.counters(
            "rl_producer_policy_downloads_total",
            "Policies that arrived (file and cache: of this host).",
            "source",
            lambda: sharing.counts.downloads,
        )
        readings.counters(
            "rl_producer_relays_left_total",
            "Failed relay downloads by reason.",
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


_COMPARED = (
    (
        "rl_producer_probe_least_lack_share",
        "Least lack of a policy's move that is refused (docs/swap-proof.md); above 1 the probe cannot judge.",
        "share",
    ),
    ("rl_producer_probe_lack_share", "Lack of the engine's move, a share of the trainer's; noise is around 0.", "lack"),
    ("rl_producer_probe_change_nats", "Move of the trainer's log-probs, root mean square.", "moved"),
    ("rl_producer_probe_noise_nats", "Engine's move minus the trainer's, root mean square.", "noise"),
)
_MOST = 100.0  # that is shown of a share


def _compared(counters: Counters, part: str) -> dict[str, float]:
    found = counters.verdict.comparisons if counters.verdict else {}
    return {name: min(_MOST, getattr(one, part)) for name, one in found.items()}


def _stages(now: Situation) -> dict[str, int]:
    work = now.workload
    waiting = len(work.waiting_floors)
    return {"waiting": waiting, "generating": work.generating, "scoring": work.scoring, "unacked": now.delivery.unacked}


def _workers(now: Situation) -> dict[str, int]:
    return {"busy": now.num_workers - now.num_idle_workers, "idle": now.num_idle_workers}
