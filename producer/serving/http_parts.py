"""Parts of ASGI applications.

Guarantee: a body is read within its limits of bytes and seconds or refused. When a client hangs up, the work for it is cancelled,
and whoever asked for that work goes on only when it has ended.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from producer.calls.refusals import RefusedError


class ClientGoneError(Exception):
    """The client hung up before it had its answer."""


class ResponseWatch:
    """Passes a response on and knows whether it has begun (`status` is 0 until then)."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def send_error(self, scope: Scope, receive: Receive, status: int, body: dict[str, Any]) -> None:
        """Sends an error unless a response has begun. That one is cut off instead, which clients notice."""
        if self.status == 0:
            headers = {"connection": "close"} if status in (408, 413) else {"retry-after": "1"} if status == 429 else {}
            await JSONResponse(body, status, headers)(scope, receive, self._send)


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """Reads the body of a request. Raises RefusedError if it is too large or comes too slowly. Raises ClientGoneError
    if the client hung up."""
    too_large = RefusedError(
        413, "too_large", f"the body has more than {max_bytes} bytes; raise serve.max_request_bytes"
    )
    announced = Headers(scope=scope).get("content-length", "0")
    if not announced.isdecimal() or int(announced) > max_bytes:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError:
        raise RefusedError(408, "too_slow", "the body did not come within serve.receive_timeout_s") from None
    return bytes(body)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does `work` unless the client hangs up meanwhile. A server says so, too, of a client that has its whole answer.
    Raises ClientGoneError if the client hung up."""

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
