"""Tests in a loop of their own, and waiting that asks no clock how far the others have got."""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

_PATIENCE_S = 30.0
_TEST_S = 120.0


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), _TEST_S))

    return run


async def settle() -> None:
    """Until everything of this loop has gone as far as it can without threads, sockets or timers."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """For what threads, sockets and timers bring about."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {_PATIENCE_S:g} s"
        await asyncio.sleep(0.005)
