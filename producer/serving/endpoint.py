"""The HTTP side of the OpenAI-compatible endpoint.

Guarantee: every request is answered or refused with a reason within `request_timeout_s`, counted once, and whatever it did to
fail is over then: its generation has ended, its place is free, its version let go. Nothing that a client sends raises out
of here.
"""

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producer.calls.calls import Answering, Call, Sampled, Stream
from producer.calls.refusals import RefusedError, error_body
from producer.calls.requests import Kind, ServedRequest, parse_request
from producer.environments.agents import Agents
from producer.environments.atropos import Atropos
from producer.serving.agent_routes import agent_routes
from producer.serving.atropos_routes import PREFIX, atropos_routes, generate_body, parse_generate
from producer.serving.client_limits import Places
from producer.serving.http_parts import App, ClientGoneError, until_gone
from producer.serving.metrics import Outcome, ServeMetrics
from producer.serving.versions import ServedVersions, model_name
from protocol.config.serve import LOOPBACK_HOSTS, ServeSection
from protocol.throttle import Throttle

logger = logging.getLogger(__name__)

VERSION_HEADER = "x-policy-version"
EPISODE_HEADER = "x-episode"


class Recorder(Protocol):
    """Who keeps what was sampled for a call. `floor` is the oldest policy that may sample it."""

    @property
    def floor(self) -> int: ...

    def note(self, sampled: Sampled) -> None: ...


class Endpoint:
    """An ASGI application.

    Args:
        keys: of which clients have to send one; none needed if empty.
        agents: in a run with posted rewards.
        atropos: in a run with `environment.atropos`.
        running: entered while a request is in the engine.
    """

    def __init__(
        self,
        settings: ServeSection,
        keys: tuple[bytes, ...],
        answering: Answering,
        versions: ServedVersions,
        places: Places,
        metrics: ServeMetrics,
        agents: Agents | None = None,
        atropos: Atropos | None = None,
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._settings = settings
        self._running = running
        self._keys = keys
        self._answering = answering
        self._versions = versions
        self._places = places
        self._metrics = metrics
        self._agents = agents
        self._warn = Throttle(logger)
        routes = self._openai_routes()
        if agents is not None:
            routes += agent_routes(agents, self.read_body)
        if atropos is not None:
            routes += [*self._openai_routes(atropos), *atropos_routes(atropos, self.read_body)]
            routes.append(Route(f"{PREFIX}/generate", App(self._generating_tokens(atropos)), methods=["POST"]))
        self._router = Router(routes)

    def _openai_routes(self, atropos: Atropos | None = None) -> list[Route]:
        prefix = "" if atropos is None else PREFIX
        return [
            Route(f"{prefix}/v1/models", App(self._models), methods=["GET"]),
            Route(f"{prefix}/v1/chat/completions", App(self._generating("chat", atropos)), methods=["POST"]),
            Route(f"{prefix}/v1/completions", App(self._generating("completion", atropos)), methods=["POST"]),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, response = time.monotonic(), _Response(send)
        outcome: Outcome = "refused"
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                self._check(Headers(scope=scope), scope["method"])
                await self._router(scope, receive, response.send)
            if response.status < 400:
                outcome = "completed"
        except RefusedError as error:
            self._metrics.refused[error.reason] += 1
            await response.say(scope, receive, error.status, error.body)
        except TimeoutError:
            outcome = "timed_out"
            limit = f"not done within serve.request_timeout_s={self._settings.request_timeout_s:g} seconds"
            await response.say(scope, receive, 504, error_body(504, "timed_out", limit))
        except ClientGoneError:
            outcome = "client_gone"
        except Exception as error:
            outcome = "failed"
            self._warn("failed", f"a request of a client failed: {type(error).__name__}: {error}", logging.ERROR)
            logger.debug("it failed here:", exc_info=True)
            await response.say(scope, receive, 500, error_body(500, "failed", "the producer's log says why"))
        self._metrics.ended(outcome, time.monotonic() - started)

    def _check(self, headers: Headers, method: str) -> None:
        if self._keys:
            sent = _key(headers.get("authorization", ""))
            if sum(hmac.compare_digest(sent, key) for key in self._keys) == 0:  # all are compared, whichever fits
                raise RefusedError(401, "wrong_key", "send a key of serve.api_key_file as Authorization: Bearer KEY")
        elif _hostname(headers.get("host", "")) not in (*LOOPBACK_HOSTS, self._settings.host):
            raise RefusedError(403, "wrong_host", "this endpoint is asked for under its own address alone")
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError(415, "malformed", "expected Content-Type: application/json")

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "slipstream"} for name in self._versions.names()
        ]
        await JSONResponse({"object": "list", "data": cards})(scope, receive, send)

    def _generating(self, kind: Kind, atropos: Atropos | None = None) -> ASGIApp:
        async def generate(scope: Scope, receive: Receive, send: Send) -> None:
            request = parse_request(kind, await self.read_body(scope, receive))
            recorder: Recorder | None = None
            name = Headers(scope=scope).get(EPISODE_HEADER) or request.metadata.get("episode")
            if atropos is not None:
                recorder, request = atropos.prepare(request)
            elif name is not None:
                recorder, request = self._with_agents.prepare(name, request)
            await until_gone(receive, self._generate(request, recorder, scope, receive, send))

        return generate

    def _generating_tokens(self, atropos: Atropos) -> ASGIApp:
        async def generate(scope: Scope, receive: Receive, send: Send) -> None:
            recorder, request = atropos.prepare(parse_generate(await self.read_body(scope, receive)))
            await until_gone(receive, self._generate(request, recorder, scope, receive, send, generate_body))

        return generate

    @property
    def _with_agents(self) -> Agents:
        if self._agents is None:
            raise RefusedError(400, "malformed", "this run has no episodes: it has no posted reward", "episode")
        return self._agents

    async def _generate(
        self,
        request: ServedRequest,
        recorder: Recorder | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        body_of: Callable[[dict[str, Any], Call], dict[str, Any]] | None = None,
    ) -> None:
        floor = 0 if recorder is None else recorder.floor
        async with self._places.take(request.num_completions), self._versions.use(request.model, floor) as adapter:
            call = Call(adapter)
            try:
                with self._running():
                    answer = await self._answering.answer(request, call)
                    if isinstance(answer, Stream):
                        await _send_events(answer.events, call, send, recorder)
                        return
                _note(recorder, call)
                body = answer.body | {"model": model_name(call.version)}
                body = body if body_of is None else body_of(body, call)
                await JSONResponse(body, headers={VERSION_HEADER: str(call.version)})(scope, receive, send)
            finally:
                self._metrics.generated(call.num_prompt_tokens, call.num_tokens)
                await call.close()

    async def read_body(self, scope: Scope, receive: Receive, limit: int | None = None) -> bytes:
        """The body of a request.

        Args:
            limit: in bytes, if it is not `serve.max_request_bytes`.

        Raises:
            RefusedError: it is too large, or comes too slowly.
            ClientGoneError: it does not come.
        """
        limit = self._settings.max_request_bytes if limit is None else limit
        body = bytearray()
        too_large = RefusedError(
            413, "too_large", f"the body has more than {limit} bytes; raise serve.max_request_bytes"
        )
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._settings.receive_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RefusedError(408, "too_slow", "the body did not come within serve.receive_timeout_s") from None


class _Response:
    """Knows whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def say(self, scope: Scope, receive: Receive, status: int, body: dict[str, Any]) -> None:
        """If nothing was said yet. An answer that has begun is cut off instead, which clients notice."""
        if self.status == 0:
            headers = {"connection": "close"} if status in (408, 413) else {"retry-after": "1"} if status == 429 else {}
            await JSONResponse(body, status, headers)(scope, receive, self._send)


def _note(recorder: Recorder | None, call: Call) -> None:
    """Before the end of the answer: who has it may rely on the recorder having it."""
    if recorder is not None:
        for sampled in call.sampled:
            if sampled.finish_reason is not None:
                recorder.note(sampled)


async def _send_events(events: AsyncGenerator[str, None], call: Call, send: Send, recorder: Recorder | None) -> None:
    begun = False
    async with aclosing(events):
        async for event in events:
            if not begun:  # not before the first one, so that what fails at once has a status of its own
                headers = [
                    (b"content-type", b"text/event-stream"),
                    (VERSION_HEADER.encode(), str(call.version).encode()),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    _note(recorder, call)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _key(authorization: str) -> bytes:
    """That was sent as a bearer, or as the password of a URL, which is all that environments of Atropos can send."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization.removeprefix("Bearer ").encode()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:  # also of what is not ASCII
        return b""


def _hostname(host: str) -> str:
    """Of a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
