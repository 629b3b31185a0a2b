"""Requests of clients in the engine.

Guarantee: whatever ends a request, afterwards its generation has ended, its room is free and its version is no longer pinned.
What was sampled is recorded before the client has the end of its answer.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from producer.calls.calls import Answering, Call, Sampled, Stream
from producer.calls.requests import ServedRequest
from producer.policies.registry import AdapterRegistry
from producer.serving.client_limits import ClientLimiter
from producer.serving.http_parts import until_gone
from producer.serving.metrics import ServeMetrics
from producer.serving.versions import ServedVersions, model_name

VERSION_HEADER = "x-policy-version"
BodyOf = Callable[[dict[str, Any], Call], dict[str, Any]]


@dataclass(frozen=True)
class ServedEngine:
    """The engine as the endpoint needs it.

    Args:
        running: entered while a request is in the engine.
    """

    answering: Answering
    adapters: AdapterRegistry
    max_num_seqs: int
    running: Callable[[], AbstractContextManager[None]] = nullcontext


class Recorder(Protocol):
    """Keeps what was sampled for a call. `floor` is the oldest policy that may sample it."""

    @property
    def floor(self) -> int: ...

    def note(self, sampled: Sampled) -> None: ...


class ClientGeneration:
    """See the module's guarantee."""

    def __init__(
        self, engine: ServedEngine, versions: ServedVersions, limiter: ClientLimiter, metrics: ServeMetrics
    ) -> None:
        self._engine = engine
        self.versions = versions
        self._limiter = limiter
        self._metrics = metrics

    async def respond(
        self,
        request: ServedRequest,
        recorder: Recorder | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        body_of: BodyOf = lambda body, _: body,
    ) -> None:
        """Generates the answer and sends it, unless the client hangs up meanwhile.

        Args:
            body_of: the body to send, made of the one that an OpenAI client gets.
        """

        async def generate() -> None:
            floor = 0 if recorder is None else recorder.floor
            async with (
                self._limiter.take(request.num_completions),
                self.versions.use(request.model, floor) as adapter,
            ):
                call = Call(adapter)
                try:
                    with self._engine.running():
                        answer = await self._engine.answering.answer(request, call)
                        if isinstance(answer, Stream):
                            await _send_events(answer.events, call, send, recorder)
                            return
                    _record(recorder, call)
                    body = body_of(answer.body | {"model": model_name(call.version)}, call)
                    await JSONResponse(body, headers={VERSION_HEADER: str(call.version)})(scope, receive, send)
                finally:
                    self._metrics.generated(call.num_prompt_tokens, call.num_tokens)
                    await call.close()

        await until_gone(receive, generate())


def _record(recorder: Recorder | None, call: Call) -> None:
    if recorder is not None:
        for sampled in call.sampled:
            if sampled.finish_reason is not None:
                recorder.note(sampled)


async def _send_events(events: AsyncGenerator[str, None], call: Call, send: Send, recorder: Recorder | None) -> None:
    """The response begins with the first event, so that a request that fails before it has a status of its own."""
    begun = False
    async with aclosing(events):
        async for event in events:
            if not begun:
                headers = [
                    (b"content-type", b"text/event-stream"),
                    (VERSION_HEADER.encode(), str(call.version).encode()),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    _record(recorder, call)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
