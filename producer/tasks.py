"""The tasks of a daemon, and what ends it.

Guarantee: the first task that fails, or whoever calls `settle` first, decides the outcome; nothing changes it afterwards.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Belongs to the running loop."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts a task whose exception ends the daemon."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._finish)
        return task

    def settle(self, error: BaseException | None) -> None:
        """The daemon is to end, with this error or because its work is done."""
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
            self.outcome.exception()  # otherwise asyncio complains where nobody asks for it
        else:
            self.outcome.set_result(None)

    async def cancel(self, limit_s: float) -> None:
        """Ends all tasks. One that hangs is left alone after this time."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=limit_s)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.settle(error)
