"""When rollouts of a lease may enter the engine, and on which policy.

Guarantee: no more groups are in the engine at once than keep it busy, so that each begins on the newest policy there is when
its turn comes; none enters while generation is paused, or the engine sleeps. An evaluation waits behind what is for training,
and gets the very version that it evaluates. A group that has become too old to be trained leaves, and its lease goes back.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from producer.interfaces import LeaseFailure
from producer.policies.registry import AdapterRegistry
from producer.rollouts.admission import Admission
from producer.rollouts.in_flight import InFlight, Sample
from protocol.wire.messages import FailureReason, Lease

Stage = Literal["waiting", "generating", "with agents", "scoring"]


class Progress:
    """How far a lease is, for the heartbeat and for the message when its deadline passes."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.enter("waiting", "no_policy", f" for policy v{lease.policy_floor}")

    def enter(self, stage: Stage, reason: FailureReason, waits_for: str = "") -> None:
        """The lease fails for this reason if its deadline passes now."""
        self.stage, self.reason, self.waits_for = stage, reason, waits_for


@dataclass
class EngineAccess:
    registry: AdapterRegistry
    admission: Admission
    in_flight: InFlight
    _is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_open.set()

    def pause(self, paused: bool) -> None:
        """While paused nothing enters the engine; what is in it goes on."""
        if paused:
            self._is_open.clear()
        else:
            self._is_open.set()

    async def wait_for(self, floor: int) -> None:
        """Returns when the current version is `floor` or newer, and nothing is paused."""
        await self.registry.wait_for(floor)
        while not (self._is_open.is_set() and self.in_flight.gate.is_open):
            await self._is_open.wait()
            await self.in_flight.gate.wait_open()
            await self.registry.wait_for(floor)

    @asynccontextmanager
    async def enter(self, lease: Lease, progress: Progress) -> AsyncIterator[Sample]:
        """Room in the engine for one group, and what samples there."""
        if lease.evaluates is not None:
            async with self.registry.pin_evaluated(lease.evaluates) as adapter:
                progress.enter("waiting", "generation_failed", " for room that training leaves in the engine")
                async with self.admission.behind(lease.sampling.num_generations):
                    await self._is_open.wait()
                    progress.enter("generating", "generation_failed")
                    yield partial(self.in_flight.sample, kept=adapter)
            return
        await self.registry.wait_for(lease.policy_floor)
        progress.enter("waiting", "generation_failed", " for room in the engine")
        async with self.admission:
            await self.wait_for(lease.policy_floor)
            progress.enter("generating", "generation_failed")
            async with self._while_usable() as outdated:
                with self.in_flight.kept(outdated) as kept:
                    yield partial(self.in_flight.sample, kept=kept, outdated=outdated)

    @asynccontextmanager
    async def _while_usable(self) -> AsyncIterator[Callable[[], None]]:
        """Yields what ends the context with the LeaseFailure `returned`."""
        scope, loop = asyncio.timeout(None), asyncio.get_running_loop()

        def end() -> None:
            if not scope.expired():
                scope.reschedule(loop.time())

        try:
            async with scope:
                yield end
        except TimeoutError:
            if not scope.expired():
                raise
            self.in_flight.counters.outdated += 1
            raise LeaseFailure("returned", "its group could only be stale") from None
