"""Parts of ASGI applications.

Guarantee: work for a client that hung up is cancelled, and whoever asked for it goes on only when it has ended.
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
    """Does `work` unless the client hangs up meanwhile. A server says so, too, of a client that has its whole answer.

    Raises:
        ClientGoneError: it did.
    """

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if working.cancelled():
        raise ClientGoneError
    working.result()
