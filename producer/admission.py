"""How many groups are in the engine at once.

Guarantee: at least one and never more than the ceiling, which keeps vLLM's scheduler full; fewer where vLLM preempts more than
it gains. Who waits longest enters first. Groups of an evaluation take the places that training leaves, and always one, so that
they neither hold training up nor starve.

A request that vLLM preempts loses its KV cache, which is computed again as that of a prompt: cheaper than decoding, and the price
of a cache that is full with whatever lengths. So some of it is tolerated. The limit moves as TCP's window does: down by a quarter
when there is more, then not again before every group that was in the engine has left (only then has the step shown what it does);
up by about one group per round of groups while the cache has room and the limit is what keeps groups out. Without numbers from
vLLM it stays where it is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from producer.interfaces import EngineLoad

DECREASE = 0.75
ROOM = 0.9  # of the KV cache in use: below it the limit may rise
TOLERATED = 1.0  # preemptions per completion: about where throughput was best (docs/benchmarks.md)


class AdmissionControl:
    """The limit alone, as a function of what it is told.

    Args:
        group_size: completions of a group.
        preemptions: before the first group.
    """

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
        """Lowers the limit if the engine has too much. Returns whether it has.

        Args:
            inside: groups in the engine.
        """
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
        """One of the `inside` groups is about to leave."""
        overloaded = self.look(inside, load)
        self._excess = max(0.0, self._excess - self._tolerated)
        self._unsettled = max(0, self._unsettled - 1)
        if not overloaded and load.kv_cache_usage < ROOM and inside >= self.limit:
            self._limit = min(float(self._ceiling), self._limit + 1.0 / self._limit)


class Admission:
    """`async with` it while a group is in the engine. Belongs to the event loop; `limit` may be read by any thread.

    Args:
        ceiling: groups that keep the engine busy.
        group_size: completions of a group.
        load: what the engine says of itself; None when it says nothing.
    """

    def __init__(self, ceiling: int, group_size: int, load: Callable[[], EngineLoad | None]) -> None:
        told = load()
        self._control = AdmissionControl(ceiling, group_size, told.preemptions if told else 0)
        self._load = load
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._background = 0  # groups of an evaluation that are in the engine
        self._waiting_behind: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def limit(self) -> int:
        return self._control.limit

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        load = self._load()
        if load is not None and self._inside:
            self._control.look(self._inside, load)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in just before
                self._inside -= 1
                self._let_in()
            raise

    async def __aexit__(self, *_: object) -> None:
        load = self._load()
        if load is not None:
            self._control.note_left(self._inside, load)
        self._inside -= 1
        self._let_in()

    @asynccontextmanager
    async def behind(self, per_place: int) -> AsyncIterator[None]:
        """A place for a group of an evaluation, after those for training.

        Args:
            per_place: of such groups, so many are worth one for training.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_behind.append((per_place, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # let in, perhaps just before its task was cancelled
                self._background -= 1
                self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._inside < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)
        free = max(1, self.limit - self._inside)
        while self._waiting_behind and self._background < free * self._waiting_behind[0][0]:
            _, turn = self._waiting_behind.popleft()
            if not turn.done():
                self._background += 1
                turn.set_result(None)
