"""The session of an episode with a server of OpenEnv.

Guarantee: no answer takes longer than `environment.call_timeout_s` or is larger than `LARGEST_ANSWER_BYTES`. Of what a server
sends unasked, two messages at most are in memory. A lost session, and an answer in another form, raise EnvironmentFailedError:
neither is a reward of zero. Only an action that the server finds invalid is the policy's: it sees the refusal and goes on. Pings
of the server are answered while the policy generates.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from producer.environments.contract import EnvironmentFailedError
from protocol.config.environment_servers import OpenEnvOptions
from protocol.errors import UNREADABLE, UNSENDABLE

_FULL, _INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
_ANSWERS = {"reset": "observation", "step": "observation", "state": "state"}
_LARGEST_REWARD = 1e30
_MAX_ERROR_CHARS = 400
LARGEST_ANSWER_BYTES = 4 * 2**20  # far more text than a policy's context has room for


class ServerFullError(Exception):
    """The server has no room for another session now."""


class _RefusedActionError(Exception):
    """The server finds an action invalid; the text has the reason."""


class _Frame(msgspec.Struct):
    type: str
    data: dict[str, Any] = {}


class _Step(msgspec.Struct):
    observation: dict[str, Any]
    reward: bool | int | float | None = None
    done: bool = False


@dataclass(eq=False)
class OpenEnvSession:
    """A session of the server behind `socket`. The text of a turn is `action_field` of an action, or the whole action if that is
    None; without `replies` turns only call tools."""

    socket: aiohttp.ClientWebSocketResponse
    url: str  # of its server
    key: str  # of its section
    options: OpenEnvOptions
    call_timeout_s: float
    replies: bool
    action_field: str | None
    done: bool = False
    _rewards: list[float] = field(default_factory=list)
    _turn: list[float] = field(default_factory=list)
    _frames: asyncio.Queue[aiohttp.WSMessage] = field(default_factory=lambda: asyncio.Queue(1))
    _reader: "asyncio.Task[None] | None" = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        self._reader.cancel()
        try:
            await asyncio.wait([self._reader])
        finally:
            await self.socket.close()

    async def reset(self, columns: dict[str, Any], prompt_id: int) -> str | None:
        wanted = self.options.arguments + ([self.options.seed] if self.options.seed else [])
        if lacking := [name for name in wanted if name not in columns]:
            raise EnvironmentFailedError(f"reset: the row has no column {lacking[0]!r}, which {self.key}.options names")
        seed = columns[self.options.seed] if self.options.seed else prompt_id
        asked = {"seed": seed} | {name: columns[name] for name in self.options.arguments}
        return self._text(await self._step("reset", asked))

    async def call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            said = await self._step("step", {"type": "call_tool", "tool_name": tool, "arguments": arguments})
        except _RefusedActionError as error:
            return str({"error": str(error)}), True
        if problem := said.get("error"):
            return str({"error": problem.get("message", problem) if isinstance(problem, dict) else problem}), True
        result = said.get("result")
        return _content(result), isinstance(result, dict) and result.get("is_error") is True

    async def reply(self, text: str) -> list[dict[str, Any]]:
        if self.done or not self.replies:
            return []
        try:
            said = self._text(await self._step("step", self._action(text)))
        except _RefusedActionError as error:
            said = str({"error": str(error)})
        return [{"role": "user", "content": said or ""}]

    async def turn_reward(self) -> float | None:
        """Return the sum of the rewards of the steps of the last turn."""
        rewards, self._turn = self._turn, []
        return sum(rewards) if rewards else None

    async def reward(self) -> float | None:
        """Return what the steps' rewards make. An episode that a limit ended before the first of them has 0, and one that the
        server ended without any has none."""
        if not self._rewards:
            return None if self.done else 0.0
        match self.options.reward:
            case "sum":
                return sum(self._rewards)
            case "max":
                return max(self._rewards)
            case "last":
                return self._rewards[-1]

    async def tools(self) -> Any:
        """Return the tools of an MCP environment, as the server describes them."""
        try:
            return (await self._step("step", {"type": "list_tools"})).get("tools")
        except _RefusedActionError as error:
            raise EnvironmentFailedError(f"{self.url} refused list_tools: {error}") from None

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a message and return the answer's data. Raises ServerFullError besides."""
        try:
            request = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        except UNSENDABLE as error:
            raise EnvironmentFailedError(f"{kind} cannot be sent to {self.url}: {error}") from None
        is_unasked = not self._frames.empty()  # such as the refusal of the session
        try:
            async with asyncio.timeout(self.call_timeout_s):
                if not is_unasked:
                    with suppress(aiohttp.ClientError, OSError):  # the reader has the reason
                        await self.socket.send_str(request)
                message = await self._frames.get()
        except TimeoutError:
            raise EnvironmentFailedError(
                f"{self.url} did not answer {kind} within {self.key}.call_timeout_s={self.call_timeout_s:g} seconds"
            ) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            self._frames.put_nowait(message)  # the next one that asks finds it, too
            if (
                isinstance(message.data, aiohttp.WebSocketError)
                and message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            ):
                raise EnvironmentFailedError(f"{self.url} answered {kind} with more than {LARGEST_ANSWER_BYTES} bytes")
            raise EnvironmentFailedError(
                f"{self.url} ended the session before it answered {kind}, which is lost ({message.type.name})",
                is_outage=True,
            )
        try:
            frame = msgspec.json.decode(message.data, type=_Frame)
        except UNREADABLE as error:
            raise self._strange(kind, error) from None
        if frame.type == "error":
            raise self._refusal(kind, frame.data)
        if is_unasked or frame.type != _ANSWERS[kind]:
            raise self._strange(kind, f"a message of type {frame.type[:40]!r}")
        return frame.data

    async def _step(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the observation, and keep the reward."""
        try:
            found = msgspec.convert(await self.ask(kind, data), _Step)
        except msgspec.ValidationError as error:
            raise self._strange(kind, error) from None
        self.done = found.done
        if kind == "step" and found.reward is not None:
            if not abs(found.reward) <= _LARGEST_REWARD:
                raise self._strange(kind, f"the reward {found.reward}")
            self._rewards.append(float(found.reward))
            self._turn.append(float(found.reward))
        return found.observation

    def _action(self, text: str) -> dict[str, Any]:
        if self.action_field is not None:
            return {self.action_field: text}
        try:
            action: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        except UNREADABLE:
            raise _RefusedActionError("An action is a JSON object.") from None
        return action

    def _text(self, observation: dict[str, Any]) -> str | None:
        """Return the part of an observation that the policy sees."""
        if (name := self.options.observation) is not None:
            return None if observation.get(name) is None else _content(observation[name])
        shown = {key: value for key, value in observation.items() if key != "metadata" and value is not None}
        return _content(next(iter(shown.values())) if len(shown) == 1 else shown) if shown else None

    def _strange(self, kind: str, what: object) -> EnvironmentFailedError:
        return EnvironmentFailedError(
            f"{self.url} answered {kind} in a form that OpenEnv does not have: {what!s:.{_MAX_ERROR_CHARS}}"
        )

    def _refusal(self, kind: str, data: dict[str, Any]) -> Exception:
        code, message = data.get("code"), str(data.get("message", ""))
        if code == _FULL and kind == "state":  # the first that is asked
            return ServerFullError(message[:_MAX_ERROR_CHARS])
        if code == _INVALID and kind == "step":
            errors = data.get("errors")
            problems = map(_problem, errors if isinstance(errors, list) else [])
            return _RefusedActionError("; ".join([message, *problems])[:_MAX_ERROR_CHARS])
        return EnvironmentFailedError(f"{self.url} refused {kind}: {code}: {message[:_MAX_ERROR_CHARS]}")

    async def _read(self) -> None:
        """Take what the server sends, until it ends the session."""
        is_open = True
        while is_open:
            message = await self.socket.receive()
            await self._frames.put(message)
            is_open = message.type is aiohttp.WSMsgType.TEXT


def _problem(error: Any) -> str:
    """Return one of pydantic's errors in words."""
    if not isinstance(error, dict):
        return str(error)
    place = error.get("loc")
    return f"{'.'.join(map(str, place)) if isinstance(place, list) else place}: {error.get('msg')}"


def _content(value: Any) -> str:
    """Return a value as text: of a result of MCP its data, or its texts."""
    if isinstance(value, dict) and "content" in value:
        parts = value["content"] if isinstance(value["content"], list) else []
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        value = value["data"] if value.get("data") is not None else "\n".join(texts) if texts else value
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        raise EnvironmentFailedError("an observation is nested too deeply to be shown") from None
