"""Room in the engine for clients.

Guarantee: clients have at most `limit` completions in the engine at once, so that training keeps the rest; who waits longest
enters first, so that none is passed over; when too many wait, the next one is told so at once.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from producer.refused import RefusedError


class Places:
    """See the module's guarantee. vLLM's own queue is first come, first served, and training keeps it short
    (`producer.admission`), so who has a place soon runs."""

    def __init__(self, limit: int, max_waiting: int) -> None:
        self.limit = limit
        self._max_waiting = max_waiting
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """`count` places for the duration of the context. Waits for them.

        Raises:
            RefusedError: more than there are, or too many wait.
        """
        if count > self.limit:
            raise RefusedError(
                400, "malformed", f"{count} completions are more than the {self.limit} of serve.max_requests", "n"
            )
        if self._waiting or self._taken + count > self.limit:
            await self._wait(count)
        else:
            self._taken += count
        try:
            yield
        finally:
            self._taken -= count
            self._let_in()

    async def _wait(self, count: int) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise RefusedError(429, "busy", f"{len(self._waiting)} requests wait already (serve.max_waiting)")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting = deque(waiting for waiting in self._waiting if waiting[1] is not turn)
            else:  # let in just before
                self._taken -= count
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self._taken + self._waiting[0][0] <= self.limit:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._taken += count
                turn.set_result(None)
