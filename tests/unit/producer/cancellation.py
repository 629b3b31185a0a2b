"""Cancels a coroutine at every place where it waits, to show that none of them leaves anything behind.

A cancellation arrives where a coroutine waits and nowhere else, so these are all of its possible ends.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from tests.unit.producer.loop import settle


async def cancel_at_each_wait(
    make: Callable[[], Coroutine[Any, Any, Any]],
    check: Callable[[], None],
    prepare: Callable[[], Awaitable[Any]] | None = None,
) -> int:
    """Runs what `make` returns once for each time that it waits, and cancels it there: alone, and again at each of the waits
    with which it ends then. Calls `prepare` before every run, which is not cancelled, and `check` after it, when the other tasks
    of the loop have gone as far as they can. The last run is the one that is not cancelled. Returns how often it waited.

    An exception other than the cancellation is raised, with the number of the wait as a note.
    """
    number = 0
    while True:
        number += 1
        for is_repeated in (False, True):
            if prepare is not None:
                await prepare()
            work = _Cancelled(make(), number, is_repeated)
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.ensure_future(work)
                await settle()
                check()
            except BaseException as error:
                error.add_note(f"cancelled at wait {number}{' and at all that followed' if is_repeated else ''}")
                raise
            if work.num_waits < number:
                return work.num_waits


class _Cancelled:
    """Awaits `work` and has its task cancelled at one of its waits."""

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, is_repeated: bool) -> None:
        self._work = work
        self._at = at
        self._is_repeated = is_repeated
        self.num_waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        step: Callable[[Any], Any] = self._work.send
        argument: Any = None
        while True:
            try:
                waits_for = step(argument)
            except StopIteration as end:
                return end.value
            self.num_waits += 1
            if self.num_waits == self._at or (self._is_repeated and self.num_waits > self._at):
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                argument, step = (yield waits_for), self._work.send
            except BaseException as error:
                argument, step = error, self._work.throw
