"""Parts of ASGI applications.

Guarantee: where there are keys, a request without one of them is refused, and no comparison says how much of a key was right;
where there are none, a web page cannot send its visitor's browser here. A body is read within its limits of bytes and seconds or
refused. When a client hangs up, the work for it is cancelled, and whoever asked for that work goes on only when it has ended.
"""

import asyncio
import base64
import hmac
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from producer.calls.requests import RefusedError, malformed
from protocol.config.operation import LOOPBACK_HOSTS


class ClientGoneError(Exception):
    """The client hung up before it had its answer."""


@dataclass
class ResponseWatch:
    """Passes a response on and knows whether it has begun (`status` is 0 until then)."""

    client: Send
    status: int = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.client(message)

    async def send_error(self, scope: Scope, receive: Receive, status: int, body: dict[str, Any]) -> None:
        """Sends an error unless a response has begun. That one is cut off instead, which clients notice."""
        if self.status == 0:
            headers = {"connection": "close"} if status in (408, 413) else {"retry-after": "1"} if status == 429 else {}
            await JSONResponse(body, status, headers)(scope, receive, self.client)


def check_access(scope: Scope, keys: tuple[bytes, ...], host: str) -> None:
    """Raises RefusedError if the client may not ask, or does not declare JSON. It has to send one of `keys`, if there are any;
    `host` is where the endpoint listens."""
    headers = Headers(scope=scope)
    if keys:
        sent = _sent_key(headers.get("authorization", ""))
        if not sum([hmac.compare_digest(sent, key) for key in keys]):  # all are compared, whichever fits
            raise RefusedError(401, "wrong_key", "send a key of serve.api_key_file as Authorization: Bearer KEY")
    elif _host_name(headers.get("host", "")) not in (*LOOPBACK_HOSTS, host):
        raise RefusedError(403, "wrong_host", "without a key, this endpoint answers under its own address alone")
    if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise malformed("expected Content-Type: application/json", status=415)


def _sent_key(authorization: str) -> bytes:
    """A bearer token, or the password of a URL, which is all that environments of Atropos can send."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization.removeprefix("Bearer ").encode()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:  # also raised for text that is not ASCII
        return b""


def _host_name(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """Raises RefusedError if the body is too large or comes too slowly, ClientGoneError if the client hung up."""
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
    """Does `work`, or raises ClientGoneError if the client hangs up meanwhile. A server says so, too, of a client that has its
    whole answer."""

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
