"""Lets groups into the engine while it has room for all their completions.

Guarantee: at least one group gets in, and as many as would fill the engine if no completion ended before its group. Beyond these
a group gets in when the engine has places and KV cache for all its completions, by what runs and waits there and what was let in
since. In a group of several turns, episodes between two turns keep their places, and those that have ended do not. Where the
engine says nothing, groups are counted whole. Groups enter in the order in which they came. Groups of an evaluation take the
places that training leaves and always those of one, so they neither delay training nor starve. A group that samples nothing,
because all its episodes wait for their environment, soon gives its place to others; it enters again before those that have not
begun. So an environment that hangs keeps no other from the engine.

A preempted request loses its KV cache, which vLLM computes again as for a prompt. That is cheaper than decoding, so some
preemptions are tolerated. The limit moves like TCP's window. It falls by a quarter when preemptions exceed the tolerance, and not
again before every group that was in the engine has left; so long, after any preemption, groups are counted whole. It rises by
about one group per round of groups while the cache has room and groups wait for the limit. Without numbers from vLLM it does not
change.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from producer.engine_contract import EngineLoad
from producer.engine_gate import FifoQueue

DECREASE = 0.75
ROOM = 0.9  # of the KV cache in use: below it the limit may rise
TOLERATED = 1.0  # preemptions per completion: about where throughput was best


class AdmissionControl:
    """The limit alone, as a function of the loads that it gets. `preemptions` are those before the first group. `ceiling` groups
    of `group_size` completions are the most."""

    def __init__(self, ceiling: int, group_size: int, preemptions: int = 0) -> None:
        self._ceiling = self._limit = float(ceiling * group_size)
        self._group_size = group_size
        self._tolerated = TOLERATED * group_size  # per group
        self._preemptions = preemptions  # as last told
        self._excess = 0.0  # of them, over what the groups that have left may cost
        self._unsettled = 0  # groups of the last decrease that are still in the engine
        self._disturbed = 0  # groups of the last preemption that are still in the engine

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def is_calm(self) -> bool:
        """Return whether every group that was in the engine at the last preemption has left."""
        return self._disturbed == 0

    def look(self, inside: int, num_completions: int, load: EngineLoad) -> bool:
        """Lower the limit if the engine has too much with `inside` groups, of which `num_completions` have not ended. Returns
        whether it has."""
        if load.preemptions > self._preemptions:
            self._disturbed = inside
        self._excess += load.preemptions - self._preemptions
        self._preemptions = load.preemptions
        if self._excess <= self._tolerated * inside:
            return False
        self._excess = 0.0
        if self._unsettled == 0:
            self._limit = max(float(self._group_size), DECREASE * min(self._limit, num_completions))
            self._unsettled = inside
        return True

    def note_left(self, inside: int, num_completions: int, load: EngineLoad) -> None:
        """Note that one of the `inside` groups is about to leave."""
        overloaded = self.look(inside, num_completions, load)
        self._excess = max(0.0, self._excess - self._tolerated)
        self._unsettled = max(0, self._unsettled - 1)
        self._disturbed = max(0, self._disturbed - 1)
        if not overloaded and load.kv_cache_usage < ROOM and num_completions + self._group_size > self.limit:
            self._limit = min(self._ceiling, self._limit + self._group_size / inside)


FILLED = 0.8  # of the KV cache, by what a completion has on average: beyond it only those enter that always do
IDLE_S = 1.0  # that a group keeps its place: about as long as its KV cache, which others may take, is worth


class Place:
    """The place of a group of `size` completions in the engine, which others have while the group samples nothing for longer than
    `IDLE_S`. `enter` waits for one, `leave` gives it back."""

    def __init__(
        self, size: int, enter: Callable[["Place", bool], Awaitable[None]], leave: Callable[["Place"], None]
    ) -> None:
        self.size = size
        self._enter, self._leave = enter, leave
        self._is_held, self._num_uses, self._entering = False, 0, asyncio.Lock()
        self._num_asked, self._num_shown = 0, 0  # completions: asked for now, and of them those in the engine's load
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_outside(self) -> int:
        """The number of completions that have room in the engine, and are not in its load."""
        return max(0, self.size - self._num_shown)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Enter, and give the place back at the end."""
        await self._enter_again(early=False)
        self._give_back_later()
        try:
            yield
        finally:
            self.give_back()

    @asynccontextmanager
    async def use(self, num_completions: int) -> AsyncIterator[None]:
        """Hold the place for the duration of the context, in which so many completions are asked for."""
        self._stop_timer()
        self._num_uses += 1
        try:
            async with self._entering:
                if not self._is_held:
                    await self._enter_again(early=True)
            self._num_asked += num_completions
            try:
                yield
            finally:
                self._num_asked -= num_completions
                self._num_shown = min(self._num_shown, self._num_asked)
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._give_back_later()

    def note_load(self) -> None:
        """Note that the engine's load has now what was asked for."""
        self._num_shown = self._num_asked

    def end_episode(self) -> None:
        """Give back the room of one completion, because its episode samples nothing any more."""
        self.size -= 1

    def give_back(self) -> None:
        self._stop_timer()
        if self._is_held:
            self._is_held = False
            self._leave(self)

    async def _enter_again(self, *, early: bool) -> None:
        await self._enter(self, early)
        self._is_held = True

    def _give_back_later(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.give_back)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Admission:
    """Has the places of groups in the engine. Belongs to the event loop; `limit` may be read by any thread. `ceiling` groups of
    `group_size` completions fill the engine; `load` is None when the engine says nothing. Call `note_load` when it changed."""

    def __init__(self, ceiling: int, group_size: int, load: Callable[[], EngineLoad | None]) -> None:
        told = load()
        self._group_size = group_size
        self._control = AdmissionControl(ceiling, group_size, told.preemptions if told else 0)
        self._load = load
        self._inside = set[Place]()
        self._line = FifoQueue[Place]()
        self._behind = set[Place]()  # groups of an evaluation that are in the engine
        self._line_behind = FifoQueue[Place]()

    @property
    def limit(self) -> int:
        """The most completions in the engine at once."""
        return self._control.limit

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """A place for a group of training."""
        place = Place(self._group_size, self._enter, self._leave)
        async with place.hold():
            yield place

    @asynccontextmanager
    async def behind(self, num_completions: int) -> AsyncIterator[Place]:
        """A place for a group of an evaluation, after those for training. As many of these as have a training group's
        completions are worth one place."""
        place = Place(num_completions, self._enter_behind, self._leave_behind)
        async with place.hold():
            yield place

    def note_load(self) -> None:
        """Let in who has room by the engine's new load."""
        for place in self._inside | self._behind:
            place.note_load()
        self._look()
        self._let_in()

    async def _enter(self, place: Place, early: bool) -> None:
        self._look()
        if not self._line.pending and self._has_room():
            self._inside.add(place)
        else:
            await self._line.wait(place, take_back=partial(self._free, place), early=early)

    def _leave(self, place: Place) -> None:
        load = self._load()
        if load is not None:
            self._control.note_left(len(self._inside), self._num_sampling(load), load)
        self._free(place)

    def _free(self, place: Place) -> None:
        self._inside.remove(place)
        self._let_in()

    async def _enter_behind(self, place: Place, early: bool) -> None:
        if not self._line_behind.pending and self._has_room_behind(place.size):
            self._behind.add(place)
        else:
            await self._line_behind.wait(place, take_back=partial(self._leave_behind, place), early=early)

    def _leave_behind(self, place: Place) -> None:
        self._behind.remove(place)
        self._let_in()

    def _look(self) -> None:
        load = self._load()
        if load is not None and self._inside:
            self._control.look(len(self._inside), self._num_sampling(load), load)

    def _num_sampling(self, load: EngineLoad) -> int:
        """Count the completions of training that may be in the engine."""
        return min(len(self._inside) * self._group_size, self._num_completions(load))

    def _num_completions(self, load: EngineLoad) -> int:
        """Count the completions in the engine, and those that have room there and are not in its load."""
        outside = sum(place.num_outside for place in self._inside) + sum(place.num_outside for place in self._behind)
        return load.running + load.waiting + outside

    def _fits(self, num_more: int) -> bool:
        """Return whether the engine has places and KV cache for so many more completions, by what it says."""
        load = self._load()
        if load is None or not self._control.is_calm:
            return False
        num = self._num_completions(load) + num_more
        return num <= self.limit and load.kv_cache_usage * num <= FILLED * load.running

    def _has_room(self) -> bool:
        size = self._group_size
        return (len(self._inside) + 1) * size <= self.limit or self._fits(size)

    def _has_room_behind(self, num_completions: int) -> bool:
        per_place = max(1, self._group_size // num_completions)
        free = self.limit // self._group_size - len(self._inside)
        return len(self._behind) < max(1, free) * per_place or (not self._line.pending and self._fits(num_completions))

    def _let_in(self) -> None:
        for place in self._line.pending:
            if not self._has_room():
                break
            self._inside.add(place)
            self._line.grant()
        for place in self._line_behind.pending:
            if not self._has_room_behind(place.size):
                return
            self._behind.add(place)
            self._line_behind.grant()
