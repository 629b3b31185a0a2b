"""The requests by which agents take tasks and end episodes (docs/serving.md).

Guarantee: that of `producer.environments.agents`, over HTTP.
"""

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from producer.calls.requests import decode_body, parse_object
from producer.environments.agents import Agents

_LONGEST_REASON = 2000  # characters


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class _Failure(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(min_length=1)]


def agent_routes(agents: Agents) -> list[Route]:
    def answered(body: dict[str, Any]) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def take(request: Request) -> Response:
        wish = decode_body(await request.body(), _Wish, "`wait_s` from 0 to 60 and nothing else")
        task = await agents.take(wish.wait_s)
        return Response(status_code=204) if task is None else answered(task)

    async def reward(request: Request) -> Response:
        return answered(agents.reward(request.path_params["episode"], parse_object(await request.body())))

    async def fail(request: Request) -> Response:
        failure = decode_body(await request.body(), _Failure, "`reason`, a text, and nothing else")
        return answered(agents.fail(request.path_params["episode"], failure.reason[:_LONGEST_REASON]))

    return [
        Route("/v1/rollouts", take, methods=["POST"]),
        Route("/v1/rollouts/{episode}/reward", reward, methods=["POST"]),
        Route("/v1/rollouts/{episode}/failure", fail, methods=["POST"]),
    ]
