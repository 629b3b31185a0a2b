"""A group's way to its place in the engine, and what samples there.

Guarantee: a group samples on a version that its lease allows, in its place, and not while the engine is paused.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from producer.engine_contract import Adapter, Completion
from producer.groups import LeaseFailure
from producer.policies.registry import AdapterRegistry
from producer.rollouts.admission import Admission, Place
from producer.rollouts.in_flight import InFlight, Sample
from protocol.wire.messages import FailureReason, Lease, Sampling

Stage = Literal["waiting", "generating", "with agents", "scoring"]


class Progress:
    """Stage of a lease, for the heartbeat and for the message when its deadline passes."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.place: Place | None = None
        self.enter("waiting", "no_policy", f" for policy v{lease.policy_floor}")

    def enter(self, stage: Stage, reason: FailureReason, waits_for: str = "") -> None:
        """The lease fails for this reason if its deadline passes now."""
        self.stage, self.reason, self.waits_for = stage, reason, waits_for

    def end_episode(self) -> None:
        """Note that an episode of the group has ended, which leaves its room in the engine to others."""
        if self.place is not None:
            self.place.end_episode()


@dataclass
class EngineAccess:
    registry: AdapterRegistry
    admission: Admission
    in_flight: InFlight
    _is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_open.set()

    def pause(self, paused: bool) -> None:
        """Let no group enter the engine while paused; those inside go on."""
        if paused:
            self._is_open.clear()
        else:
            self._is_open.set()

    async def wait_for(self, floor: int) -> None:
        """Return when the current version is `floor` or newer, and nothing is paused."""
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
                async with self.admission.behind(lease.sampling.num_generations) as place:
                    progress.place = place
                    await self._is_open.wait()
                    progress.enter("generating", "generation_failed")
                    yield partial(self._sample_evaluated, place, adapter)
            return
        await self.registry.wait_for(lease.policy_floor)
        progress.enter("waiting", "generation_failed", " for room in the engine")
        async with self.admission.place() as place:
            progress.place = place
            await self.wait_for(lease.policy_floor)
            progress.enter("generating", "generation_failed")
            async with self._while_usable() as outdated:
                with ExitStack() as pins:
                    yield self._sample_on_one(place, lease, pins, outdated)

    def _sample_on_one(self, place: Place, lease: Lease, pins: ExitStack, outdated: Callable[[], None]) -> Sample:
        """Return what samples a group, on the adapter that is current when it samples first if it is to stay on one."""
        kept: Adapter | None = None
        has_begun = False

        async def sample(prompt_ids: list[int], sampling: Sampling) -> list[Completion]:
            nonlocal kept, has_begun
            if not has_begun:  # a group that waits in a pause has no use for its place
                await self.wait_for(lease.policy_floor)
            async with place.use(sampling.num_generations):
                if not has_begun:
                    await self.registry.wait_for(lease.policy_floor)
                if not has_begun:  # by another of the group meanwhile
                    has_begun, kept = True, pins.enter_context(self.in_flight.pin_for_group(outdated))
                return await self.in_flight.sample(prompt_ids, sampling, kept, outdated)

        return sample

    async def _sample_evaluated(
        self, place: Place, adapter: Adapter, prompt_ids: list[int], sampling: Sampling
    ) -> list[Completion]:
        async with place.use(sampling.num_generations):
            return await self.in_flight.sample(prompt_ids, sampling, adapter)

    @asynccontextmanager
    async def _while_usable(self) -> AsyncIterator[Callable[[], None]]:
        """Yield what ends the context with the LeaseFailure `returned`."""
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
