"""What agents ask beside completions: a task, and to end an episode (docs/serving.md).

Guarantee: as `producer.environments.agents`, over HTTP.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from producer.calls.refusals import RefusedError
from producer.calls.requests import parse_object
from producer.environments.agents import Agents
from producer.serving.http_parts import App, until_gone

_LONGEST_WAIT_S = 60.0
_LONGEST_REASON = 2000  # characters

ReadBody = Callable[[Scope, Receive], Awaitable[bytes]]


def agent_routes(agents: Agents, read_body: ReadBody) -> list[Route]:
    """
    Args:
        read_body: of a request, within the endpoint's limits.
    """

    async def take(scope: Scope, receive: Receive, send: Send) -> None:
        values = parse_object(await read_body(scope, receive))
        wait_s = values.pop("wait_s", 0.0)
        if values or type(wait_s) not in (int, float) or not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise RefusedError(
                400, "malformed", f"expected `wait_s` from 0 to {_LONGEST_WAIT_S:g} and nothing else", "wait_s"
            )

        async def hand_out() -> None:
            await _respond(await agents.take(wait_s), scope, receive, send)

        await until_gone(receive, hand_out())

    async def reward(scope: Scope, receive: Receive, send: Send) -> None:
        values = parse_object(await read_body(scope, receive))
        await _respond(agents.reward(scope["path_params"]["episode"], values), scope, receive, send)

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        values = parse_object(await read_body(scope, receive))
        reason = values.pop("reason", None)
        if values or not isinstance(reason, str) or not reason:
            raise RefusedError(400, "malformed", "expected `reason`, a text, and nothing else", "reason")
        episode = scope["path_params"]["episode"]
        await _respond(agents.fail(episode, reason[:_LONGEST_REASON]), scope, receive, send)

    return [
        Route("/v1/rollouts", App(take), methods=["POST"]),
        Route("/v1/rollouts/{episode}/reward", App(reward), methods=["POST"]),
        Route("/v1/rollouts/{episode}/failure", App(fail), methods=["POST"]),
    ]


async def _respond(body: dict[str, Any] | None, scope: Scope, receive: Receive, send: Send) -> None:
    content = None if body is None else msgspec.json.encode(body)
    response = Response(content, 204 if content is None else 200, media_type="application/json")
    await response(scope, receive, send)
