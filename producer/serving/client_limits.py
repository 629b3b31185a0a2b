"""Room in the engine for clients.

Guarantee: clients have at most `limit` completions in the engine at once, so that training keeps the rest; who waits longest
enters first, so that none is passed over; when too many wait, the next one is told so at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from producer.calls.refusals import RefusedError
from producer.waiting_line import WaitingLine


class Places:
    """See the module's guarantee. vLLM's own queue is first come, first served, and training keeps it short
    (`producer.rollouts.admission`), so who has a place soon runs."""

    def __init__(self, limit: int, max_waiting: int) -> None:
        self.limit = limit
        self._max_waiting = max_waiting
        self._taken = 0
        self._line = WaitingLine[int, int]()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        return len(self._line.wishes)

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
        if self.waiting or self._taken + count > self.limit:
            await self._wait(count)
        else:
            self._taken += count
        try:
            yield
        finally:
            self._give_back(count)

    async def _wait(self, count: int) -> None:
        if self.waiting >= self._max_waiting:
            raise RefusedError(429, "busy", f"{self.waiting} requests wait already (serve.max_waiting)")
        try:
            await self._line.wait(count, take_back=self._give_back)
        except asyncio.CancelledError:
            self._let_in()  # smaller ones may have stood behind it
            raise

    def _give_back(self, count: int) -> None:
        self._taken -= count
        self._let_in()

    def _let_in(self) -> None:
        for count in self._line.wishes:
            if self._taken + count > self.limit:
                return
            self._taken += count
            self._line.give(count)
