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
    """Totals since the producer started. Written by the asyncio loop, read by any thread."""

    policy_version: int = -1
    tokens: int = 0
    groups: int = 0
    failed: int = 0
    abandoned: int = 0
    failed_swaps: int = 0


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
class Identity:
    """What the trainer is told about this producer."""

    name: str
    facts: EngineFacts
    capacity: int


class LinkEvents(Protocol):
    """What the link tells the rest of the producer. Called on the link's thread."""

    def session_began(self, policy: PolicyInfo) -> None:
        """A trainer process that this producer has not served before; leases of the one before are void."""

    def leased(self, lease: Lease) -> None: ...

    def abandoned(self, lease_id: str) -> None:
        """The trainer does not want this lease's group any more."""

    def policy_arrived(self, policy: PolicyInfo, blob: bytes, announced_at: float) -> None: ...

    def ended(self, error: BaseException | None) -> None:
        """The last call. None: the trainer has finished, or `stop` was called."""
