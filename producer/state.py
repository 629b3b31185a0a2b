"""What the parts of a producer say of themselves: totals, and how far each is.

Guarantee: a number has one writer, and any thread may read it.
"""

from dataclasses import dataclass
from typing import Literal

from protocol.wire.messages import EngineFacts


@dataclass
class Counters:
    """Totals since the producer started, and the version loaded. Each has one writer; any thread may read them."""

    policy_version: int = -1
    tokens: int = 0
    prompt_tokens: int = 0  # once per group
    completions: int = 0
    truncated: int = 0  # of the completions
    cut: int = 0  # completions that went on under a newer policy, once per cut
    restarted: int = 0  # groups
    dropped_tokens: int = 0  # by restarts
    turns: int = 0  # of episodes
    tool_calls: int = 0
    failed_tool_calls: int = 0
    failed_episodes: int = 0
    groups: int = 0
    failed: int = 0
    timed_out: int = 0  # of the failed
    swaps: int = 0
    failed_swaps: int = 0
    refused_version: int = -1  # the newest that failed, until a newer one is live
    refusal: str = ""
    abandoned: int = 0  # written by the link, as the next one
    settled: int = 0
    idle_s: float = 0.0  # connected without a request in the engine


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
    """All that a producer can wait for, at one moment."""

    workload: Workload
    delivery: Delivery
    policy_version: int  # -1 while none is loaded
    num_workers: int
    num_idle_workers: int


@dataclass(frozen=True)
class Identity:
    """What the trainer is told about this producer."""

    name: str
    facts: EngineFacts
    capacity: int
    swap_mode: Literal["adapter", "merged"] = "adapter"
    evaluates: bool = False
