"""The HTTP side of the OpenAI-compatible endpoint.

Guarantee: every request is answered or refused with a reason within `request_timeout_s`, and counted once. Nothing that a client
sends raises out of here.
"""

import asyncio
import logging
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from producer.calls.refusals import RefusedError, error_body, malformed
from producer.calls.requests import Kind, parse_request
from producer.environments.agents import Agents
from producer.environments.atropos import Atropos
from producer.serving.access import check_access
from producer.serving.agent_routes import agent_routes
from producer.serving.atropos_routes import PREFIX, atropos_routes, generate_body, parse_generate
from producer.serving.generation import ClientGeneration, Recorder
from producer.serving.http_parts import App, ClientGoneError, ResponseWatch, body_reader
from producer.serving.metrics import RequestOutcome, ServeMetrics
from protocol.config.sections.serve import ServeSection
from protocol.throttle import Throttle

logger = logging.getLogger(__name__)

EPISODE_HEADER = "x-episode"


class Endpoint:
    """An ASGI application.

    Args:
        keys: of which clients have to send one; none is needed if empty.
        agents: in a run with posted rewards.
        atropos: in a run with `environment.atropos`.
    """

    def __init__(
        self,
        settings: ServeSection,
        keys: tuple[bytes, ...],
        generation: ClientGeneration,
        metrics: ServeMetrics,
        agents: Agents | None = None,
        atropos: Atropos | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._generation = generation
        self._metrics = metrics
        self._agents = agents
        self._warn = Throttle(logger)
        self._read_body = body_reader(settings.max_request_bytes, settings.receive_timeout_s)
        routes = self._openai_routes()
        if agents is not None:
            routes += agent_routes(agents, self._read_body)
        if atropos is not None:
            read_large = body_reader(atropos.max_body_bytes, settings.receive_timeout_s)
            routes += [*self._openai_routes(atropos), *atropos_routes(atropos, read_large)]
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
        started, response = time.monotonic(), ResponseWatch(send)
        outcome: RequestOutcome = "refused"
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                check_access(scope, self._keys, self._settings.host)
                await self._router(scope, receive, response.send)
            if response.status < 400:
                outcome = "completed"
        except RefusedError as error:
            self._metrics.refuse(error.reason)
            await response.send_error(scope, receive, error.status, error.body)
        except TimeoutError:
            outcome = "timed_out"
            limit = f"not done within serve.request_timeout_s={self._settings.request_timeout_s:g} seconds"
            await response.send_error(scope, receive, 504, error_body(504, "timed_out", limit))
        except ClientGoneError:
            outcome = "client_gone"
        except Exception as error:
            outcome = "failed"
            self._warn("failed", f"a request of a client failed: {type(error).__name__}: {error}", logging.ERROR)
            logger.debug("it failed here:", exc_info=True)
            body = error_body(500, "failed", "the producer's log says why")
            await response.send_error(scope, receive, 500, body)
        self._metrics.ended(outcome, time.monotonic() - started)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = self._generation.versions.names()
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "slipstream"} for name in names]
        await JSONResponse({"object": "list", "data": cards})(scope, receive, send)

    def _generating(self, kind: Kind, atropos: Atropos | None = None) -> ASGIApp:
        async def generate(scope: Scope, receive: Receive, send: Send) -> None:
            request = parse_request(kind, await self._read_body(scope, receive))
            recorder: Recorder | None = None
            episode = Headers(scope=scope).get(EPISODE_HEADER) or request.metadata.get("episode")
            if atropos is not None:
                recorder, request = atropos.prepare(request)
            elif episode is not None:
                if self._agents is None:
                    raise malformed("this run has no episodes: it has no posted reward", "episode")
                recorder, request = self._agents.prepare(episode, request)
            await self._generation.respond(request, recorder, scope, receive, send)

        return generate

    def _generating_tokens(self, atropos: Atropos) -> ASGIApp:
        async def generate(scope: Scope, receive: Receive, send: Send) -> None:
            recorder, request = atropos.prepare(parse_generate(await self._read_body(scope, receive)))
            await self._generation.respond(request, recorder, scope, receive, send, generate_body)

        return generate
