"""Requests of clients in the engine.

Guarantee: whatever ends a request, afterwards its generation has ended, its room is free and its version is no longer pinned.
Sampled tokens are recorded before the client has the end of its answer.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from producer.engine_gate import EngineGate
from producer.policies.registry import AdapterRegistry
from slipstream_extras.endpoint.metrics import ServeMetrics
from slipstream_extras.endpoint.openai import Answering, BodyOf, Call, Recorder, RefusedError, ServedRequest
from slipstream_extras.endpoint.versions import ClientLimiter, ServedVersions, model_name

VERSION_HEADER = "x-policy-version"
TRAINERS_TURN = "it is the trainer's turn on the GPU (pipeline.gpu: turns); ask again"


@dataclass(frozen=True)
class ServedEngine:
    """The engine, as far as the endpoint needs it. `running` is entered while a request is in the engine."""

    answering: Answering
    adapters: AdapterRegistry
    max_num_seqs: int
    running: Callable[[], AbstractContextManager[None]] = nullcontext
    gate: EngineGate = field(default_factory=EngineGate)

    @asynccontextmanager
    async def entered(self, call: Call) -> AsyncIterator[None]:
        """Keep a call in the engine, and remove all of it at the end. Raises RefusedError when it has to leave for the trainer's
        turn on the GPU."""
        scope = asyncio.timeout(None)
        loop = asyncio.get_running_loop()
        try:
            async with self.gate.use(lambda: scope.reschedule(loop.time())), scope:
                with self.running():
                    try:
                        yield
                    finally:
                        await call.close()
        except TimeoutError:
            if scope.expired():
                raise RefusedError(429, "busy", TRAINERS_TURN) from None
            raise


@dataclass(frozen=True)
class ClientGeneration:
    """The way of a request through the engine and back to its client."""

    engine: ServedEngine
    versions: ServedVersions
    limiter: ClientLimiter
    metrics: ServeMetrics

    async def respond(
        self,
        request: ServedRequest,
        recorder: Recorder | None,
        body_of: BodyOf,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Generate the answer and send it."""
        floor = 0 if recorder is None else recorder.floor
        async with self.limiter.take(request.num_completions), self.versions.use(request.model, floor) as adapter:
            call = Call(adapter)
            try:
                async with self.engine.entered(call):
                    answer = await self.engine.answering.answer(request, call)
                    if not isinstance(answer, dict):
                        await _send_events(answer, call, send, recorder)
                        return
                _record(recorder, call)
                body = body_of(answer | {"model": model_name(call.version)}, call)
                await JSONResponse(body, headers={VERSION_HEADER: str(call.version)})(scope, receive, send)
            finally:
                self.metrics.prompt_tokens += call.num_prompt_tokens
                self.metrics.completion_tokens += call.num_tokens


def _record(recorder: Recorder | None, call: Call) -> None:
    if recorder is not None:
        for sampled in call.sampled:
            if sampled.finish_reason is not None:
                recorder.note(sampled)


async def _send_events(events: AsyncGenerator[str, None], call: Call, send: Send, recorder: Recorder | None) -> None:
    """Send a stream. The response begins with the first event, so a request that fails before it has its own status."""
    begun = False
    async with aclosing(events):
        async for event in events:
            if not begun:
                headers = {b"content-type": b"text/event-stream", VERSION_HEADER.encode(): str(call.version).encode()}
                await send({"type": "http.response.start", "status": 200, "headers": list(headers.items())})
                begun = True
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    _record(recorder, call)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
