"""The way into the engine, which is closed while the engine sleeps (`pipeline.gpu: turns`).

Guarantee: once `close` has returned nothing is in the engine, and nothing enters it before `open`. Whoever is in it when the gate
closes is told to leave, after the least time that it asked for and at the latest when the time of `close` is over. Loading and
unloading (`upkeep`) may enter until it is closed, so that nobody in the engine waits for what stands before the gate. Belongs to
the event loop.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

Leave = Callable[[], object]


class _User:
    """A user of the engine, while it is inside."""

    def __init__(self, leave: Leave, after_s: float) -> None:
        self._leave = leave
        self._was_told = False
        self._loop = asyncio.get_running_loop()
        self._may_leave_at = self._loop.time() + after_s
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Make the user leave as soon as its least time is over."""
        if self._may_leave_at < math.inf:
            self._timer = self._loop.call_at(self._may_leave_at, self.tell)

    def tell(self) -> None:
        """Make the user leave now. It is told once, because it may take longer than this turn."""
        if not self._was_told:
            self._was_told = True
            self._leave()

    def recall(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EngineGate:
    """Open at first."""

    def __init__(self) -> None:
        self._state: Literal["open", "closing", "closed"] = "open"
        self._opened, self._awake, self._left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._awake.set()
        self._users: set[_User] = set()
        self._num_upkeep = 0

    @property
    def is_open(self) -> bool:
        return self._state == "open"

    async def wait_open(self) -> None:
        while not self.is_open:
            await self._opened.wait()

    @asynccontextmanager
    async def use(self, leave: Leave = lambda: None, after_s: float = math.inf) -> AsyncIterator[None]:
        """A request in the engine; waits while the gate is closed or closing. `leave` ends it soon. When the gate closes it is
        called, once, but not before `after_s` from now, or only (infinite) if the request stays too long."""
        await self.wait_open()
        user = _User(leave, after_s)
        self._users.add(user)
        try:
            yield
        finally:
            user.recall()
            self._users.discard(user)
            self._left.set()

    @asynccontextmanager
    async def upkeep(self) -> AsyncIterator[None]:
        """Something that is done to the engine; waits while the gate is closed."""
        while self._state == "closed":
            await self._awake.wait()
        self._num_upkeep += 1
        try:
            yield
        finally:
            self._num_upkeep -= 1
            self._left.set()

    async def close(self, within_s: float) -> None:
        """Returns when nobody is in the engine. When it is cancelled the gate is open again."""
        self._state = "closing"
        self._opened.clear()
        for user in list(self._users):
            user.ask()
        try:
            try:
                async with asyncio.timeout(within_s):
                    await self._until_empty()
            except TimeoutError:
                for user in list(self._users):
                    user.tell()
                await self._until_empty()
        except BaseException:
            self.open()
            raise
        self._state = "closed"
        self._awake.clear()

    def open(self) -> None:
        self._state = "open"
        for user in self._users:
            user.recall()
        self._opened.set()
        self._awake.set()

    async def _until_empty(self) -> None:
        while self._users or self._num_upkeep:
            self._left.clear()
            await self._left.wait()
