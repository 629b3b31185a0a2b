"""Waiting that asks no clock how far the others have got."""

import asyncio
import time
from collections.abc import Callable

_PATIENCE_S = 30.0


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
