"""A queue of tasks that wait for a grant.

Guarantee: the task that has waited longest stands first, behind those that wait `early`. A cancelled task leaves the queue at
once and for good; a grant that races with its cancellation is returned, once.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

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
