"""The HTTP side of the OpenAI-compatible endpoint.

Guarantee: every request is answered or refused with a reason within `request_timeout_s`, and counted once. Nothing that a client
sends raises out of here.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producer.calls.requests import RefusedError, ServedRequest, check_request, error_body, malformed, parse_object
from producer.environments.agents import Agents
from producer.environments.atropos import Atropos
from producer.serving.generation import TRAINERS_TURN, BodyOf, ClientGeneration, Recorder
from producer.serving.http_parts import ClientGoneError, ResponseWatch, check_access, read_body, until_gone
from producer.serving.metrics import RequestOutcome
from producer.serving.routes import PREFIX, agent_routes, atropos_routes, generate_body, parse_generate
from protocol.config.operation import ServeSection
from protocol.runtime.logs import Throttle

logger = logging.getLogger(__name__)

EPISODE_HEADER = "x-episode"


@dataclass
class Endpoint:
    """An ASGI application. Where there are `keys`, clients have to send one."""

    settings: ServeSection
    keys: tuple[bytes, ...] = field(repr=False)
    generation: ClientGeneration
    agents: Agents | None = None
    atropos: Atropos | None = None
    _warn: Throttle = field(default_factory=partial(Throttle, logger))

    def __post_init__(self) -> None:
        routes = self._openai_routes("")
        if self.agents is not None:
            routes += agent_routes(self.agents)
        if self.atropos is not None:
            routes += [*self._openai_routes(PREFIX), *atropos_routes(self.atropos)]
            routes.append(self._generating(f"{PREFIX}/generate", parse_generate, generate_body))
        self._router = Router(routes)

    def _openai_routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/v1/models", self._models),
            self._generating(f"{prefix}/v1/chat/completions", lambda body: check_request("chat", parse_object(body))),
            self._generating(f"{prefix}/v1/completions", lambda body: check_request("completion", parse_object(body))),
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
        if self.atropos is not None and scope["path"].startswith(PREFIX):
            limit = self.atropos.max_body_bytes
        body = await read_body(scope, receive, limit, self.settings.receive_timeout_s)

        async def read() -> Message:
            return {"type": "http.request", "body": body}

        await until_gone(receive, self._router(scope, read, send))

    async def _models(self, _: Request) -> JSONResponse:
        names = self.generation.versions.names()
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "slipstream"} for name in names]
        return JSONResponse({"object": "list", "data": cards})

    def _generating(
        self, path: str, parse: Callable[[bytes], ServedRequest], body_of: BodyOf = lambda body, _: body
    ) -> Route:
        async def generate(request: Request) -> ASGIApp:
            wanted = parse(await request.body())
            recorder: Recorder | None = None
            episode = request.headers.get(EPISODE_HEADER) or wanted.metadata.get("episode")
            if self.atropos is not None and path.startswith(PREFIX):
                recorder, wanted = self.atropos.prepare(wanted)
            elif episode is not None:
                if self.agents is None:
                    raise malformed("this run has no episodes: it has no posted reward", "episode")
                recorder, wanted = self.agents.prepare(episode, wanted)
            return partial(self.generation.respond, wanted, recorder, body_of)

        return Route(path, generate, methods=["POST"])
