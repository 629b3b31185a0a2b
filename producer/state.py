"""What the parts of a producer say of themselves: totals, and how far each is.

Guarantee: a number has one writer, and any thread may read it.
"""

import threading
from dataclasses import dataclass, field
from typing import Any


def _total(metric: str, text: str) -> Any:
    return field(default=0, metadata={"metric": metric, "text": text})


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
        "Times that a completion was cut at a swap and went on under the new policy (swap.in_flight: continue).",
    )
    restarted: int = _total(
        "rl_producer_groups_restarted_total", "Groups that began again at a swap (swap.in_flight: restart)."
    )
    outdated: int = _total(
        "rl_producer_groups_outdated_total",
        "Groups that were ended while they were generated, because they had become too old to be trained. Their leases go back.",
    )
    dropped_tokens: int = _total("rl_producer_tokens_dropped_total", "Tokens that restarts threw away.")
    turns: int = _total("rl_producer_turns_total", "Turns of the policy in episodes with an environment.")
    tool_calls: int = _total("rl_producer_tool_calls_total", "Tool calls that the policy asked for.")
    failed_tool_calls: int = _total(
        "rl_producer_tool_calls_failed_total", "Of these, those that the policy was told an error for."
    )
    failed_episodes: int = _total(
        "rl_producer_episodes_failed_total",
        "Episodes that are not scored, because their environment failed or they took too long.",
    )
    groups: int = _total("rl_producer_groups_generated_total", "Groups generated and scored.")
    failed: int = _total("rl_producer_leases_failed_total", "Leases answered with a refusal.")
    timed_out: int = _total("rl_producer_leases_timed_out_total", "Of these, those that ran into their deadline.")
    swaps: int = 0
    failed_swaps: int = 0
    refused_version: int = -1  # the newest that failed, until a newer one is live
    refusal: str = ""
    abandoned: int = _total("rl_producer_leases_abandoned_total", "Leases that the trainer did not want any more.")
    settled: int = _total("rl_producer_groups_settled_total", "Groups that the trainer acknowledged.")
    idle_s: float = 0.0  # connected without a request in the engine, which is awake
    asleep_in: int = -1  # the trainer's turn on the GPU in which the engine sleeps; -1: it does not
    asleep_s: float = _total("rl_producer_asleep_seconds_total", "Time that the engine slept in the trainer's turns.")


@dataclass
class PolicyCounts:
    """Where policies came from, and why relays were left. Any thread may count and read."""

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
class EngineLoad:
    """What vLLM's scheduler said last, and how often it has preempted a request since it started."""

    kv_cache_usage: float  # share of the blocks, from 0 to 1
    running: int  # requests, of which a group has one per completion
    waiting: int
    preemptions: int


@dataclass(frozen=True)
class Workload:
    """Where the leases are that are worked on."""

    waiting_floors: tuple[int, ...]  # one policy floor per lease that waits for that version, or for room in the engine
    generating: int
    scoring: int
    busy_s: float  # time with a request in the engine, since the producer started
    with_agents: int = 0  # of those that are generating
    takes_leases: bool = True  # False while the engine cannot generate


@dataclass(frozen=True)
class Delivery:
    """What the link holds, and for whom."""

    connected: bool
    heard_ago_s: float
    held: int
    unacked: int
    unacked_bytes: int
    full: bool


@dataclass(frozen=True)
class Situation:
    """All that a producer can say of itself, at one moment."""

    counters: Counters
    workload: Workload
    delivery: Delivery
    group_limit: int
    num_workers: int
    num_idle_workers: int
