"""A stand-in for a server of OpenEnv 0.10, with its protocol as it was seen: numbers to guess, or a tool that adds."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

_TEXT = {"type": "string"}
GUESS = {
    "action": {"title": "GuessAction", "properties": {"metadata": {}, "guess": _TEXT}, "required": ["guess"]},
    "observation": {"properties": {"said": _TEXT, "metadata": {}}},
}
TOOLS = {"action": {"title": "CallToolAction", "properties": {"tool_name": _TEXT}, "required": ["tool_name"]}}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@dataclass
class OpenEnvServer:
    """Secrets are `seed` modulo 10. `says` may change what is sent to a message: data, a whole frame as text, or None for no
    answer and bytes for the end of the session."""

    schema: dict[str, Any] = field(default_factory=lambda: GUESS)
    capacity: int = 64
    heartbeat_s: float | None = None
    says: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda _, answer: answer
    num_sessions: int = 0
    most_sessions: int = 0
    resets: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def describe(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        return web.json_response(self.schema)

    async def play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self.heartbeat_s)
        await socket.prepare(request)
        if self.num_sessions >= self.capacity:
            await socket.send_json(_error("CAPACITY_REACHED", "no room"))
            await socket.close()
            return socket
        self.num_sessions += 1
        self.most_sessions = max(self.most_sessions, self.num_sessions)
        try:
            state = {"sum": 0, "secret": 0}
            async for message in socket:
                asked = json.loads(message.data)
                said = self.says(asked, self._answer(asked, state))
                if isinstance(said, bytes):
                    break
                if said is not None:
                    await socket.send_str(said if isinstance(said, str) else json.dumps(said))
        finally:
            self.num_sessions -= 1
        return socket

    def _answer(self, asked: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        match asked:
            case {"type": "state", **others} if not others:
                return {"type": "state", "data": state}
            case {"type": "reset", "data": data}:
                self.resets.append(data)
                state["secret"] = data["seed"] % 10
                return _observation({"said": " guess", "metadata": {}})
            case {"data": {"type": "list_tools"}}:
                return _observation({"tools": [ADD], "metadata": {}})
            case {"data": {"type": "call_tool", "arguments": {"a": int(number)}}}:
                state["sum"] += number
                return _observation(
                    {"tool_name": "add", "result": {"data": state["sum"], "content": []}}, 0.5, number == 0
                )
            case {"data": {"type": "call_tool"}}:
                return _observation({"error": {"error_type": "invalid_args", "message": "a is no number"}})
            case {"data": {"guess": str(text)}} if text.isdigit():
                is_right = int(text) == state["secret"]
                return _observation({"said": "right" if is_right else "wrong"}, 1.0 if is_right else -0.25, is_right)
        return _error("VALIDATION_ERROR", "Invalid message", [{"loc": ["guess"], "msg": "Input should be digits"}])


@asynccontextmanager
async def running(server: OpenEnvServer) -> AsyncIterator[str]:
    """Serve while the context lasts; yield the address."""
    app = web.Application()
    app.add_routes([web.get("/schema", server.describe), web.get("/ws", server.play)])
    async with TestServer(app) as test_server:
        yield str(test_server.make_url("")).rstrip("/")


def _observation(observation: dict[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def _error(code: str, message: str, errors: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message} | ({"errors": errors} if errors else {})}
