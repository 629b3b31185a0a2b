"""When rollouts of a lease may enter the engine, and on which policy.

Guarantee: no more groups are in the engine at once than keep it busy, so that each begins on the newest policy there is when
its turn comes; none enters while generation is paused. An evaluation waits behind what is for training, and gets the very
version that it evaluates.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from producer.interfaces import Adapter, Completion
from producer.policies.registry import AdapterRegistry
from producer.rollouts.admission import Admission
from producer.rollouts.in_flight import InFlight
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease, Sampling

Sample = Callable[[list[int], Sampling], Awaitable[list[Completion]]]


class BusyClock:
    """Time during which at least one request is in the engine."""

    def __init__(self) -> None:
        self._active = 0
        self._since = 0.0
        self._total_s = 0.0

    def busy_s(self) -> float:
        return self._total_s + (time.monotonic() - self._since if self._active else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._active == 0:
            self._since = time.monotonic()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._total_s += time.monotonic() - self._since


class PolicyGate:
    """Holds leases back until the policy is current that they need, and while generation is paused."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._is_open = asyncio.Event()
        self._is_open.set()

    def pause(self, paused: bool) -> None:
        """While paused nothing enters the engine; what is in it goes on."""
        if paused:
            self._is_open.clear()
        else:
            self._is_open.set()

    async def opened(self) -> None:
        await self._is_open.wait()

    async def wait_for(self, floor: int) -> None:
        """Returns when the current version is `floor` or newer, and nothing is paused."""
        await self._registry.wait_for(floor)
        while not self._is_open.is_set():
            await self._is_open.wait()
            await self._registry.wait_for(floor)


class EngineAccess:
    """See the module's guarantee.

    Args:
        clock: runs while a request is in the engine.
        group_size: completions of a group for training.
    """

    def __init__(
        self,
        gate: PolicyGate,
        registry: AdapterRegistry,
        admission: Admission,
        in_flight: InFlight,
        clock: BusyClock,
        group_size: int,
    ) -> None:
        self._gate = gate
        self._registry = registry
        self._admission = admission
        self._in_flight = in_flight
        self._clock = clock
        self._group_size = group_size

    @asynccontextmanager
    async def enter(self, lease: Lease, progress: Progress) -> AsyncIterator[Sample]:
        """Room in the engine for one group, and what samples there."""
        if lease.evaluates is not None:
            async with self._registry.pin_evaluated(lease.evaluates) as adapter:
                progress.enter("waiting", "generation_failed", " for room that training leaves in the engine")
                async with self._admission.behind(max(1, self._group_size // lease.sampling.num_generations)):
                    await self._gate.opened()
                    progress.enter("generating", "generation_failed")
                    yield partial(self._sample, adapter)
            return
        await self._registry.wait_for(lease.policy_floor)
        progress.enter("waiting", "generation_failed", " for room in the engine")
        async with self._admission:
            await self._gate.wait_for(lease.policy_floor)
            progress.enter("generating", "generation_failed")
            with self._in_flight.kept() as kept:
                yield partial(self._sample, kept)

    async def _sample(self, adapter: Adapter | None, prompt_ids: list[int], sampling: Sampling) -> list[Completion]:
        with self._clock.running():
            return await self._in_flight.sample(prompt_ids, sampling, adapter)
