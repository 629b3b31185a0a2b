"""What the parts of a producer hand each other.

Guarantee: nothing here imports a library, so every part can be tested with stand-ins for the others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.messages import FailureReason, Sampling


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
