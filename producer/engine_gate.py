"""The way into the engine, which is closed while the engine sleeps (`pipeline.gpu: turns`).

Guarantee: once `close` has returned, the engine is empty and stays so until `open`. Requests inside a closing gate are cancelled
after their `min_run_s`, or when `close(within_s)` expires. Loading and unloading (`upkeep`) may enter until the gate is closed,
because requests inside may wait for them. Belongs to the event loop.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Literal, TypeVar

Request = TypeVar("Request")


class FifoQueue(Generic[Request]):
    """Tasks that wait in order, each with a request that the queue's owner decides by."""

    def __init__(self) -> None:
        self._grants: dict[asyncio.Future[None], tuple[bool, Request]] = {}  # whether it waits late

    @property
    def pending(self) -> list[Request]:
        """The requests without a grant, in order."""
        return [self._grants[grant][1] for grant in self._in_order()]

    async def wait(self, request: Request, take_back: Callable[[], None], *, early: bool = False) -> None:
        """Wait for a grant. `take_back` is called if the task was given one and was cancelled before it could use it."""
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grants[grant] = not early, request
        try:
            await grant
        except asyncio.CancelledError:
            if not grant.cancelled():
                take_back()
            raise
        finally:
            del self._grants[grant]

    def grant(self) -> None:
        """Grant the first pending request."""
        self._in_order()[0].set_result(None)

    def _in_order(self) -> "list[asyncio.Future[None]]":
        pending = [grant for grant in self._grants if not grant.done()]
        return sorted(pending, key=lambda grant: self._grants[grant][0])


Leave = Callable[[], object]


class _User:
    """A user of the engine, while it is inside."""

    def __init__(self, leave: Leave, min_run_s: float) -> None:
        self._leave = leave
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._may_leave_at = self._loop.time() + min_run_s
        self._timer: asyncio.TimerHandle | None = None

    def cancel_later(self) -> None:
        """Cancel the user as soon as its least time is over."""
        if self._may_leave_at < math.inf:
            self._timer = self._loop.call_at(self._may_leave_at, self.cancel)

    def cancel(self) -> None:
        """Cancel the user now, but only once: it may take longer than this turn to leave."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._leave()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EngineGate:
    """Gate before the engine, which is open at first."""

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
    async def use(self, leave: Leave = lambda: None, min_run_s: float = math.inf) -> AsyncIterator[None]:
        """Hold a place in the engine for one request; waits while the gate is closed or closing. `leave` must end the request
        soon. When the gate closes it is called once, after `min_run_s`, or (infinite) only when `within_s` expires."""
        await self.wait_open()
        user = _User(leave, min_run_s)
        self._users.add(user)
        try:
            yield
        finally:
            user.stop_timer()
            self._users.discard(user)
            self._left.set()

    @asynccontextmanager
    async def upkeep(self) -> AsyncIterator[None]:
        """Hold a place for loading or unloading; waits while the gate is closed."""
        while self._state == "closed":
            await self._awake.wait()
        self._num_upkeep += 1
        try:
            yield
        finally:
            self._num_upkeep -= 1
            self._left.set()

    async def close(self, within_s: float) -> None:
        """Close the gate and wait until the engine is empty. Opens the gate again if cancelled."""
        self._state = "closing"
        self._opened.clear()
        for user in list(self._users):
            user.cancel_later()
        try:
            try:
                async with asyncio.timeout(within_s):
                    await self._until_empty()
            except TimeoutError:
                for user in list(self._users):
                    user.cancel()
                await self._until_empty()
        except BaseException:
            self.open()
            raise
        self._state = "closed"
        self._awake.clear()

    def open(self) -> None:
        self._state = "open"
        for user in self._users:
            user.stop_timer()
        self._opened.set()
        self._awake.set()

    async def _until_empty(self) -> None:
        while self._users or self._num_upkeep:
            self._left.clear()
            await self._left.wait()
