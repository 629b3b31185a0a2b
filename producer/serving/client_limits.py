"""The client concurrency limiter.

Guarantee: clients have at most `limit` completions in the engine at once, so that training keeps the rest. The request that has
waited longest enters first, so that none is passed over. When too many wait, the next one is refused at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from producer.calls.requests import RefusedError, malformed
from producer.waiting_line import WaitingLine


@dataclass
class ClientLimiter:
    """vLLM's own queue is first come, first served, and training keeps it short (`producer.rollouts.admission`), so a request
    that was let in soon runs."""

    limit: int
    max_waiting: int
    taken: int = 0  # completions in the engine
    _line: WaitingLine[int] = field(default_factory=WaitingLine)

    @property
    def num_waiting(self) -> int:
        return len(self._line.wishes)

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Waits for room for `count` completions, and holds it within. Raises RefusedError if the limit is below `count`, or too
        many requests wait."""
        if count > self.limit:
            raise malformed(f"{count} completions are more than the {self.limit} of serve.max_requests", "n")
        if self.num_waiting or self.taken + count > self.limit:
            await self._wait(count)
        else:
            self.taken += count
        try:
            yield
        finally:
            self._give_back(count)

    async def _wait(self, count: int) -> None:
        if self.num_waiting >= self.max_waiting:
            raise RefusedError(429, "busy", f"{self.num_waiting} requests wait already (serve.max_waiting)")
        try:
            await self._line.wait(count, take_back=lambda: self._give_back(count))
        except asyncio.CancelledError:
            self._let_in()  # smaller requests may have stood behind this one
            raise

    def _give_back(self, count: int) -> None:
        self.taken -= count
        self._let_in()

    def _let_in(self) -> None:
        for count in self._line.wishes:
            if self.taken + count > self.limit:
                return
            self.taken += count
            self._line.give()
