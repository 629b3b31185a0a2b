"""Limits how many groups are in the engine at once.

Guarantee: at least one group and never more than the ceiling, which keeps vLLM's scheduler full; fewer while preemptions cost
more than they gain. Groups enter in the order in which they came. Groups of an evaluation take the places that training leaves
and always have one, so they neither delay training nor starve. A group that samples nothing, because all its episodes wait for
their environment, soon gives its place to others; it enters again before those that have not begun. So an environment that hangs
keeps no other from the engine.

A preempted request loses its KV cache, which vLLM computes again as for a prompt. That is cheaper than decoding, so some
preemptions are tolerated. The limit moves like TCP's window. It falls by a quarter when preemptions exceed the tolerance, and not
again before every group that was in the engine has left. It rises by about one group per round of groups while the cache has room
and groups wait for the limit. Without numbers from vLLM it does not change.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from producer.engine_contract import Adapter, Completion, EngineLoad
from producer.fifo_queue import FifoQueue
from producer.groups import LeaseFailure
from producer.policies.registry import AdapterRegistry
from producer.rollouts.in_flight import InFlight, Sample
from protocol.wire.messages import FailureReason, Lease, Sampling

DECREASE = 0.75
ROOM = 0.9  # of the KV cache in use: below it the limit may rise
IDLE_S = 1.0  # that a group keeps its place: about as long as its KV cache, which others may take, is worth
TOLERATED = 1.0  # preemptions per completion: about where throughput was best


class AdmissionControl:
    """The limit alone, as a function of the loads that it gets. `preemptions` are those before the first group."""

    def __init__(self, ceiling: int, group_size: int, preemptions: int = 0) -> None:
        self._ceiling = ceiling
        self._tolerated = TOLERATED * group_size  # per group
        self._limit = float(ceiling)
        self._preemptions = preemptions  # as last told
        self._excess = 0.0  # of them, over what the groups that have left may cost
        self._unsettled = 0  # groups of the last decrease that are still in the engine

    @property
    def limit(self) -> int:
        return int(self._limit)

    def look(self, inside: int, load: EngineLoad) -> bool:
        """Lower the limit if the engine has too much with `inside` groups. Returns whether it has."""
        self._excess += load.preemptions - self._preemptions
        self._preemptions = load.preemptions
        if self._excess <= self._tolerated * inside:
            return False
        self._excess = 0.0
        if self._unsettled == 0:
            self._limit = max(1.0, DECREASE * min(self._limit, inside))
            self._unsettled = inside
        return True

    def note_left(self, inside: int, load: EngineLoad) -> None:
        """Note that one of the `inside` groups is about to leave."""
        overloaded = self.look(inside, load)
        self._excess = max(0.0, self._excess - self._tolerated)
        self._unsettled = max(0, self._unsettled - 1)
        if not overloaded and load.kv_cache_usage < ROOM and inside >= self.limit:
            self._limit = min(float(self._ceiling), self._limit + 1.0 / self._limit)


class Place:
    """The place of a group in the engine, which others have while the group samples nothing for longer than `IDLE_S`. `enter`
    waits for one again, `leave` gives it back."""

    def __init__(self, enter: Callable[[], Awaitable[None]], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave
        self._is_held, self._num_uses, self._entering = True, 0, asyncio.Lock()
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.give_back)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        """Hold the place for the duration of the context."""
        self._timer.cancel()
        self._num_uses += 1
        try:
            async with self._entering:
                if not self._is_held:
                    await self._enter()
                    self._is_held = True
            yield
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.give_back)

    def give_back(self) -> None:
        self._timer.cancel()
        if self._is_held:
            self._is_held = False
            self._leave()


class Admission:
    """Has the places of groups in the engine. Belongs to the event loop; `limit` may be read by any thread. `ceiling` groups keep
    the engine busy; `load` is None when the engine says nothing."""

    def __init__(self, ceiling: int, group_size: int, load: Callable[[], EngineLoad | None]) -> None:
        told = load()
        self._group_size = group_size
        self._control = AdmissionControl(ceiling, group_size, told.preemptions if told else 0)
        self._load = load
        self._inside = 0
        self._line = FifoQueue[None]()
        self._background = 0  # groups of an evaluation that are in the engine
        self._line_behind = FifoQueue[int]()

    @property
    def limit(self) -> int:
        return self._control.limit

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """A place for a group of training."""
        await self._enter()
        place = Place(partial(self._enter, early=True), self._leave)
        try:
            yield place
        finally:
            place.give_back()

    @asynccontextmanager
    async def behind(self, num_completions: int) -> AsyncIterator[Place]:
        """A place for a group of an evaluation, after those for training. As many of these as have a training group's
        completions are worth one place."""
        per_place = max(1, self._group_size // num_completions)
        await self._enter_behind(per_place)
        place = Place(partial(self._enter_behind, per_place, early=True), self._leave_behind)
        try:
            yield place
        finally:
            place.give_back()

    async def _enter(self, *, early: bool = False) -> None:
        load = self._load()
        if load is not None and self._inside:
            self._control.look(self._inside, load)
        if not self._line.pending and self._inside < self.limit:
            self._inside += 1
        else:
            await self._line.wait(None, take_back=self._free, early=early)

    def _leave(self) -> None:
        load = self._load()
        if load is not None:
            self._control.note_left(self._inside, load)
        self._free()

    def _free(self) -> None:
        self._inside -= 1
        self._let_in()

    async def _enter_behind(self, per_place: int, *, early: bool = False) -> None:
        if not self._line_behind.pending and self._has_room_behind(per_place):
            self._background += 1
        else:
            await self._line_behind.wait(per_place, take_back=self._leave_behind, early=early)

    def _leave_behind(self) -> None:
        self._background -= 1
        self._let_in()

    def _has_room_behind(self, per_place: int) -> bool:
        return self._background < max(1, self.limit - self._inside) * per_place

    def _let_in(self) -> None:
        for _ in self._line.pending:
            if self._inside >= self.limit:
                break
            self._inside += 1
            self._line.grant()
        for per_place in self._line_behind.pending:
            if not self._has_room_behind(per_place):
                return
            self._background += 1
            self._line_behind.grant()


Stage = Literal["waiting", "generating", "with agents", "scoring"]


class Progress:
    """Stage of a lease, for the heartbeat and for the message when its deadline passes."""

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
                    await self._is_open.wait()
                    progress.enter("generating", "generation_failed")
                    yield partial(self._sample_evaluated, place, adapter)
            return
        await self.registry.wait_for(lease.policy_floor)
        progress.enter("waiting", "generation_failed", " for room in the engine")
        async with self.admission.place() as place:
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
            async with place.use():
                if not has_begun:
                    await self.registry.wait_for(lease.policy_floor)
                if not has_begun:  # by another of the group meanwhile
                    has_begun, kept = True, pins.enter_context(self.in_flight.pin_for_group(outdated))
                return await self.in_flight.sample(prompt_ids, sampling, kept, outdated)

        return sample

    async def _sample_evaluated(
        self, place: Place, adapter: Adapter, prompt_ids: list[int], sampling: Sampling
    ) -> list[Completion]:
        async with place.use():
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
