"""The requests by which agents take tasks and end episodes (docs/serving.md).

Guarantee: that of `producer.environments.agents`, over HTTP.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from producer.calls.refusals import malformed
from producer.calls.requests import parse_object
from producer.environments.agents import Agents
from producer.serving.http_parts import App, ReadBody, until_gone

_LONGEST_WAIT_S = 60.0
_LONGEST_REASON = 2000  # characters
_Fields = dict[str, Any]


def agent_routes(agents: Agents, read_body: ReadBody) -> list[Route]:
    async def take(_episode: str, fields: _Fields) -> _Fields | None:
        wait_s = fields.pop("wait_s", 0.0)
        if fields or type(wait_s) not in (int, float) or not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise malformed(f"expected `wait_s` from 0 to {_LONGEST_WAIT_S:g} and nothing else", "wait_s")
        return await agents.take(wait_s)

    async def reward(episode: str, fields: _Fields) -> _Fields:
        return agents.reward(episode, fields)

    async def fail(episode: str, fields: _Fields) -> _Fields:
        reason = fields.pop("reason", None)
        if fields or not isinstance(reason, str) or not reason:
            raise malformed("expected `reason`, a text, and nothing else", "reason")
        return agents.fail(episode, reason[:_LONGEST_REASON])

    def route(path: str, answer: Callable[[str, _Fields], Awaitable[_Fields | None]]) -> Route:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            fields = parse_object(await read_body(scope, receive))

            async def respond() -> None:
                body = await answer(scope["path_params"].get("episode", ""), fields)
                content, status = (None, 204) if body is None else (msgspec.json.encode(body), 200)
                await Response(content, status, media_type="application/json")(scope, receive, send)

            await until_gone(receive, respond())

        return Route(path, App(app), methods=["POST"])

    return [
        route("/v1/rollouts", take),
        route("/v1/rollouts/{episode}/reward", reward),
        route("/v1/rollouts/{episode}/failure", fail),
    ]
