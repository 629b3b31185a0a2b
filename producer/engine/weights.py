"""What both kinds of weights have in common: how requests run under them, and how vLLM's workers prepare new ones.

Guarantee: `prepare` returns when every worker is done, or says why one is not, and whether that may pass.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from producer.interfaces import Adapter, AdapterFailedError, AdapterRefusedError, PolicyWeights

Generate = Callable[[str, Any, str], Awaitable[Any]]
"""Runs a request of vLLM, given its id, its LoRARequest or None, and a salt: requests share KV with those of the same salt."""

_POLL_S = (0.005, 0.05)  # at first, and at most


@dataclass(eq=False)
class InFlightRequest:
    """One group in the engine: the version it began on, and each flip since."""

    version: int
    flips: list[tuple[int, dict[int, int]]] = field(default_factory=list)  # to a version; tokens that completions had
    invalidated: bool = False
    task: "asyncio.Task[Any] | None" = None

    def token_versions(self, index: int, num_tokens: int) -> list[int]:
        """Of completion `index`. One that the workers did not know at a flip had not begun."""
        versions: list[int] = []
        version = self.version
        for next_version, counts in self.flips:
            versions += [version] * (min(counts.get(index, 0), num_tokens) - len(versions))
            version = next_version
        return versions + [version] * (num_tokens - len(versions))


class Core(Protocol):
    """What weights need of the engine core."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on every worker, which answers once each between two steps."""

    async def score(self, token_ids: list[int], lora: Any, salt: str) -> list[float]: ...


class VllmWeights(PolicyWeights, Protocol):
    """The policies that requests of this engine run on."""

    holds_versions: bool
    """Whether there are several at a time, so that a request stays on the one it began on."""

    async def start(self) -> None:
        """Prepares the workers, once, before the first request."""

    def lora_request(self, adapter: Adapter) -> Any:
        """vLLM's LoRARequest for this policy; None if it is in the engine's own weights."""

    async def sample(self, generate: Generate, adapter: Adapter) -> tuple[Any, InFlightRequest]:
        """What `generate` returns for a group under this policy, and which versions sampled it."""


async def prepare(core: Core, what: str, argument: Any) -> None:
    """Has the workers do `what`_prepare, and waits until `what`_state is "running" on none. Raises AdapterRefusedError where one
    refuses, AdapterFailedError where one has failed."""
    await core.call_workers(f"{what}_prepare", argument)
    pause_s, longest_s = _POLL_S
    while "running" in (errors := dict(await core.call_workers(f"{what}_state"))):
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    if "refused" in errors:
        raise AdapterRefusedError(errors["refused"])
    if "failed" in errors:
        raise AdapterFailedError(errors["failed"])
