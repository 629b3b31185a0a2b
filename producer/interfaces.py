"""What the parts of a producer hand each other.

Guarantee: nothing here imports a library, so every part can be tested with stand-ins for the others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.messages import EngineFacts, FailureReason, Lease, PolicyInfo, Sampling


@dataclass(frozen=True)
class Adapter:
    """One policy version as the engine knows it. Name, id and path belong to this load alone (see `AdapterRegistry`)."""

    version: int
    name: str
    id: int
    path: Path


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (with the end-of-sequence token, if it was sampled) and the log-prob of each."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool


@dataclass
class Counters:
    """Totals since the producer started, and the version loaded. Each has one writer; any thread may read them."""

    policy_version: int = -1
    tokens: int = 0
    groups: int = 0
    failed: int = 0
    timed_out: int = 0  # of the failed
    swaps: int = 0
    failed_swaps: int = 0
    abandoned: int = 0  # written by the link, as the next one
    settled: int = 0


class LeaseFailure(Exception):  # noqa: N818 - a result that travels to the trainer, not a defect
    """Why one lease cannot be answered with a group. It is data: the daemon goes on."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailureReason = reason
        self.detail = detail


class AdapterRefusedError(Exception):
    """The engine is alive, but does not take this adapter."""


class GenerationEngine(Protocol):
    """What generation and the adapter registry need of `producer.engine.Engine`."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter) -> list[Completion]: ...

    async def load_adapter(self, adapter: Adapter) -> None: ...

    async def unload_adapter(self, adapter: Adapter) -> None: ...


@dataclass(frozen=True)
class Workload:
    """Where the leases are that are worked on."""

    waiting_floors: tuple[int, ...]  # one policy floor per lease that waits for that version, or for room in the engine
    generating: int
    scoring: int
    busy_s: float  # time with a request in the engine, since the producer started


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
class Identity:
    """What the trainer is told about this producer."""

    name: str
    facts: EngineFacts
    capacity: int


class LinkEvents(Protocol):
    """What the link tells the rest of the producer. Called on the link's thread."""

    def run_began(self, policy: PolicyInfo) -> None:
        """A run that this producer has not served before; every lease of the one before is void."""

    def session_began(self, policy: PolicyInfo) -> None:
        """Another trainer process of the same run. Its leases go on, and its newest version may be an older one."""

    def leased(self, lease: Lease) -> None: ...

    def abandoned(self, lease_id: str) -> None:
        """The trainer does not want this lease's group any more."""

    def policy_arrived(self, policy: PolicyInfo, blob: bytes, announced_at: float) -> None: ...

    def outbox_full(self, full: bool) -> None:
        """Said when it changes: while it is full, no generation may begin."""

    def ended(self, error: BaseException | None) -> None:
        """The last call. None: the trainer has finished, or `stop` was called."""
