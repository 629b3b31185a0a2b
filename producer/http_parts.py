"""Parts of ASGI applications.

Guarantee: work for a client that hung up ends.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class ClientGoneError(Exception):
    """It hung up before it had its answer."""


class App:
    """Starlette takes a function for one that returns a response; this is no function."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does `work` unless the client hangs up meanwhile."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(hang_up())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGoneError
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
