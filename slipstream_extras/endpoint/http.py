"""The HTTP side of the OpenAI-compatible endpoint.

Guarantee: every request is answered or refused with a reason within `request_timeout_s`, and counted once. No request raises out
of here. Where there are keys, a request without one of them is refused, and no comparison shows how much of a key was right;
where there are none, a web page cannot send its visitor's browser here. A body is read within its limits of bytes and seconds or
refused. A call of an episode names it in the URL, in headers or in the body, all alike; two names that disagree are refused.
When a client hangs up, the work for it is cancelled, and has ended before the caller goes on.
"""

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.config.operation import LOOPBACK_HOSTS, ServeSection
from protocol.runtime.logs import Throttle
from slipstream_extras.endpoint.agents import Agents, agent_routes
from slipstream_extras.endpoint.dialects import anthropic_error, check_messages, check_responses
from slipstream_extras.endpoint.generation import TRAINERS_TURN, ClientGeneration
from slipstream_extras.endpoint.metrics import RequestOutcome
from slipstream_extras.endpoint.openai import (
    BodyOf,
    EndpointPlugin,
    Recorder,
    RefusedError,
    ServedRequest,
    check_request,
    error_body,
    malformed,
    parse_object,
)

logger = logging.getLogger(__name__)

MESSAGES_PATH = "/v1/messages"
EPISODE_HEADER = "x-episode"
SESSION_HEADER = "x-session-id"


@dataclass
class Endpoint:
    """The ASGI application. If there are `keys`, clients have to send one."""

    settings: ServeSection
    keys: tuple[bytes, ...] = field(repr=False)
    generation: ClientGeneration
    agents: Agents | None = None
    plugin: EndpointPlugin | None = None
    _warn: Throttle = field(default_factory=partial(Throttle, logger))

    def __post_init__(self) -> None:
        routes = [
            route
            for prefix in ("", "/episodes/{episode}")
            for route in [*self._openai_routes(prefix), *self._dialect_routes(prefix)]
        ]
        if self.agents is not None:
            routes += agent_routes(self.agents)
        if self.plugin is not None:
            routes += [*self._openai_routes(self.plugin.prefix), *self.plugin.routes(self._generating)]
        self._router = Router(routes)

    def _openai_routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/v1/models", self._models),
            self._generating(f"{prefix}/v1/chat/completions", lambda body: check_request("chat", parse_object(body))),
            self._generating(f"{prefix}/v1/completions", lambda body: check_request("completion", parse_object(body))),
        ]

    def _dialect_routes(self, prefix: str) -> list[Route]:
        return [
            self._generating(f"{prefix}{MESSAGES_PATH}", lambda body: check_messages(parse_object(body))),
            self._generating(f"{prefix}/v1/responses", lambda body: check_responses(parse_object(body))),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, response = time.monotonic(), ResponseWatch(send)
        outcome: RequestOutcome = "refused"
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                check_access(scope, self.keys, self.settings.host)
                await self._respond(scope, receive, response.send)
            if response.status < 400:
                outcome = "completed"
        except RefusedError as error:
            self.generation.metrics.refuse(error.reason)
            await response.send_error(scope, receive, error.status, error.body)
        except TimeoutError:
            if self.generation.engine.gate.is_open:
                outcome, status, kind = "timed_out", 504, "timed_out"
                text = f"not done within serve.request_timeout_s={self.settings.request_timeout_s:g} seconds"
            else:
                status, kind, text = 429, "busy", TRAINERS_TURN
                self.generation.metrics.refuse("busy")
            await response.send_error(scope, receive, status, error_body(status, kind, text))
        except ClientGoneError:
            outcome = "client_gone"
        except Exception as error:
            outcome = "failed"
            self._warn("failed", f"a request of a client failed: {type(error).__name__}: {error}", logging.ERROR)
            logger.debug("it failed here:", exc_info=True)
            body = error_body(500, "failed", "the producer's log says why")
            await response.send_error(scope, receive, 500, body)
        self.generation.metrics.ended(outcome, time.monotonic() - started)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.settings.max_request_bytes
        if self.plugin is not None and scope["path"].startswith(self.plugin.prefix):
            limit = self.plugin.max_body_bytes
        body = await read_body(scope, receive, limit, self.settings.receive_timeout_s)

        async def read() -> Message:
            return {"type": "http.request", "body": body}

        await until_gone(receive, self._router(scope, read, send))

    async def _models(self, request: Request) -> JSONResponse:
        if (episode := request.path_params.get("episode")) is not None:
            self._episodes().find(episode)
        names = self.generation.versions.names()
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "slipstream"} for name in names]
        return JSONResponse({"object": "list", "data": cards})

    def _generating(
        self, path: str, parse: Callable[[bytes], ServedRequest], body_of: BodyOf = lambda body, _: body
    ) -> Route:
        async def generate(request: Request) -> ASGIApp:
            wanted = parse(await request.body())
            recorder: Recorder | None = None
            if self.plugin is not None and path.startswith(self.plugin.prefix):
                recorder, wanted = self.plugin.prepare(wanted)
            elif (episode := named_episode(request, wanted, self.agents)) is not None:
                recorder, wanted = self._episodes().prepare(episode, wanted)
            return partial(self.generation.respond, wanted, recorder, body_of)

        return Route(path, generate, methods=["POST"])

    def _episodes(self) -> Agents:
        if self.agents is None:
            raise malformed("this run has no episodes: it has no posted reward", "episode")
        return self.agents


def named_episode(request: Request, wanted: ServedRequest, agents: Agents | None) -> str | None:
    """Return the episode that a request names. A session that is no episode's is a client's own label, as all are without
    agents. Raises RefusedError if two names disagree."""
    headers = request.headers
    named = [
        ("the URL", request.path_params.get("episode")),
        *((EPISODE_HEADER, name) for name in headers.getlist(EPISODE_HEADER)),
        ("metadata.episode", wanted.metadata.get("episode")),
    ]
    sessions = [
        ("session_id", wanted.session_id),
        *((SESSION_HEADER, name) for name in headers.getlist(SESSION_HEADER)),
    ]
    named += [(place, name) for place, name in sessions if agents is not None and agents.is_episode(name or "")]
    named = [(place, name) for place, name in named if name is not None]
    for place, name in named:
        if name != named[0][1]:
            first = f"{named[0][0]} names {named[0][1]!r:.80}"
            raise malformed(f"{first}, but {place} names {name!r:.80}; name one episode", "episode")
    return named[0][1] if named else None


class ClientGoneError(Exception):
    """The client hung up before it had its answer."""


@dataclass
class ResponseWatch:
    """A response on its way to the client. `status` is 0 until it has begun."""

    client: Send
    status: int = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.client(message)

    async def send_error(self, scope: Scope, receive: Receive, status: int, body: dict[str, Any]) -> None:
        """Send an error unless a response has begun, which is cut off instead; clients notice that."""
        if self.status == 0:
            body = anthropic_error(status, body) if scope["path"].endswith(MESSAGES_PATH) else body
            headers = {"connection": "close"} if status in (408, 413) else {"retry-after": "1"} if status == 429 else {}
            await JSONResponse(body, status, headers)(scope, receive, self.client)


def check_access(scope: Scope, keys: tuple[bytes, ...], host: str) -> None:
    """Raise RefusedError if the client has none of `keys` where there are any, or does not declare JSON. The endpoint listens at
    `host`."""
    headers = Headers(scope=scope)
    if keys:
        sent = _sent_key(headers.get("authorization") or headers.get("x-api-key", ""))
        if not sum([hmac.compare_digest(sent, key) for key in keys]):  # all are compared, so the time shows nothing
            raise RefusedError(401, "wrong_key", "send a key of serve.api_key_file as Authorization: Bearer KEY")
    elif _host_name(headers.get("host", "")) not in (*LOOPBACK_HOSTS, host):
        raise RefusedError(403, "wrong_host", "without a key, this endpoint answers under its own address alone")
    if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise malformed("expected Content-Type: application/json", status=415)


def _sent_key(authorization: str) -> bytes:
    """Return a key alone (as in Anthropic's `x-api-key`), the bearer token, or the password of a URL, for clients that can send
    nothing else."""
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
    """Read a body. Raises RefusedError if it is too large or too slow, ClientGoneError if the client hung up."""
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
    """Do `work`, or raise ClientGoneError if the client hangs up meanwhile. The server reports that also of a client that has its
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
