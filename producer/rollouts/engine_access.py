"""When rollouts of a lease may enter the engine, and on which policy.

Guarantee: no more groups are in the engine at once than keep it busy, so that each begins on the newest policy there is when
its turn comes; none enters while generation is paused. An evaluation waits behind what is for training, and gets the very
version that it evaluates.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from producer.policies.registry import AdapterRegistry
from producer.rollouts.admission import Admission
from producer.rollouts.in_flight import InFlight, Sample
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease


class EngineAccess:
    def __init__(self, registry: AdapterRegistry, admission: Admission, in_flight: InFlight) -> None:
        self._registry = registry
        self._admission = admission
        self._in_flight = in_flight
        self._is_open = asyncio.Event()
        self._is_open.set()

    def pause(self, paused: bool) -> None:
        """While paused nothing enters the engine; what is in it goes on."""
        if paused:
            self._is_open.clear()
        else:
            self._is_open.set()

    async def wait_for(self, floor: int) -> None:
        """Returns when the current version is `floor` or newer, and nothing is paused."""
        await self._registry.wait_for(floor)
        while not self._is_open.is_set():
            await self._is_open.wait()
            await self._registry.wait_for(floor)

    @asynccontextmanager
    async def enter(self, lease: Lease, progress: Progress) -> AsyncIterator[Sample]:
        """Room in the engine for one group, and what samples there."""
        if lease.evaluates is not None:
            async with self._registry.pin_evaluated(lease.evaluates) as adapter:
                progress.enter("waiting", "generation_failed", " for room that training leaves in the engine")
                async with self._admission.behind(lease.sampling.num_generations):
                    await self._is_open.wait()
                    progress.enter("generating", "generation_failed")
                    yield partial(self._in_flight.sample, kept=adapter)
            return
        await self._registry.wait_for(lease.policy_floor)
        progress.enter("waiting", "generation_failed", " for room in the engine")
        async with self._admission:
            await self.wait_for(lease.policy_floor)
            progress.enter("generating", "generation_failed")
            with self._in_flight.kept() as kept:
                yield partial(self._in_flight.sample, kept=kept)
