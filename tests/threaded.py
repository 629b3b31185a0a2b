"""Servers beside a test that is not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

Address = TypeVar("Address")


@contextmanager
def in_thread(serving: Callable[[], AbstractAsyncContextManager[Address]]) -> Iterator[Address]:
    """Hold an asynchronous context in a thread of its own while this one lasts; yield what it yields."""
    loop, found = asyncio.new_event_loop(), list[Address]()
    has_begun, may_end = threading.Event(), asyncio.Event()

    async def hold() -> None:
        async with serving() as address:
            found.append(address)
            has_begun.set()
            await may_end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(hold(),))
    thread.start()
    try:
        assert has_begun.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(may_end.set)
        thread.join(30)
        loop.close()
