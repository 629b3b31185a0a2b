"""The process of one environment, which is made once and reset for every episode, as TRL does.

Guarantee: unless the environment blocks or kills the process, its result is returned as a value or as a reason. Only its public
methods can be called as tools, or, if it has `get_tools` and `call_tool`, those that it lists. `producer.environments.pool` runs
it as `python -m producer.environments.worker FD FACTORY OPTIONS`.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec

from producer.environments.contract import OutageError
from producer.rewards.spans import FLOAT32_MAX
from protocol.config.functions import ENVIRONMENT_PLUGINS, is_plugin, load_function, make_plugin
from protocol.errors import ConfigError
from protocol.runtime.worker_channel import WorkerChannel, end_before_daemon, raised

_NOT_TOOLS = ("reset", "reply", "get_reward", "get_turn_reward")


class Call(msgspec.Struct, frozen=True):
    """A request. `describe` asks for a JSON schema of each tool, and for the existence of `get_reward`, `get_turn_reward` and
    `reply`; the others are the calls of TRL's trainer to an environment, `reply` and `turn_reward`."""

    kind: Literal["describe", "reset", "tool", "reply", "reward", "turn_reward"]
    name: str = ""
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True):
    """The result; with a `problem` there is no value. If a tool raised, the value has its error and `raised` is set. `done` tells
    that the environment has ended the episode, and `is_outage` that the problem is a server's."""

    value: Any = None
    problem: str = ""
    raised: bool = False
    done: bool = False
    is_outage: bool = False


class Environment:
    """An instance of the user's class or of a plugin, and its tools."""

    def __init__(self, factory: str, options: dict[str, Any]) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._instance = (
            make_plugin(ENVIRONMENT_PLUGINS, factory, options, "environment.factory")
            if is_plugin(factory)
            else load_function(factory, "environment.factory")()
        )
        functions = inspect.getmembers(type(self._instance), predicate=inspect.isfunction)
        self._names = {name for name, _ in functions}
        if "reset" not in self._names:
            raise ConfigError(f"environment.factory: {factory} makes a {type(self._instance).__name__} without `reset`")
        self._tools = {
            name: getattr(self._instance, name)
            for name in sorted(self._names)
            if name not in _NOT_TOOLS and not name.startswith("_")
        }
        self._lists_tools = {"get_tools", "call_tool"} <= self._names

    def answer(self, call: Call) -> Answer:
        try:
            answer, done = self._answered(call), getattr(self._instance, "done", False)
            return msgspec.structs.replace(answer, done=not callable(done) and bool(done))  # a tool may have that name
        except ConfigError as error:
            return Answer(problem=f"found a problem: {error}")
        except OutageError as error:
            return Answer(problem=f"failed: {error}", is_outage=True)
        except Exception:
            return Answer(problem=raised())

    def _answered(self, call: Call) -> Answer:
        match call.kind:
            case "describe":
                methods = ("get_reward", "get_turn_reward", "reply")
                return Answer([self._schemas(), *(method in self._names for method in methods)])
            case "reset":
                self._clear_done()
                return Answer(_observation(self._run(self._instance.reset, call.arguments)))
            case "reply":
                return Answer(_messages(self._run(self._instance.reply, call.arguments)))
            case "reward":
                return Answer(_number(self._run(self._instance.get_reward, {}), "get_reward"))
            case "turn_reward":
                return Answer(_number(self._run(self._instance.get_turn_reward, {}), "get_turn_reward"))
            case "tool":
                return self._tool(call)

    def _clear_done(self) -> None:
        """Clear what the episode before has set, where `done` is no tool and no property that only reads."""
        with suppress(Exception):
            if not callable(self._instance.done):
                self._instance.done = False

    def _schemas(self) -> list[dict[str, Any]]:
        if self._lists_tools:
            return self._run(self._instance.get_tools, {})  # type: ignore[no-any-return]
        from transformers.utils import get_json_schema  # takes seconds, and only the first process is asked

        return [get_json_schema(tool) for tool in self._tools.values()]

    def _tool(self, call: Call) -> Answer:
        """Return the content of the tool's message. If the tool raises, it is TRL's text for that, which the model sees."""
        try:
            if self._lists_tools:
                result = self._run(self._instance.call_tool, {"name": call.name, "arguments": call.arguments})
            elif call.name not in self._tools:
                raise ValueError(f"Tool {call.name} not found.")
            else:
                result = self._run(self._tools[call.name], call.arguments)
        except OutageError:
            raise
        except Exception as error:
            return Answer(str({"error": str(error)}), raised=True)
        return Answer(result if isinstance(result, list) else str(result))

    def _run(self, method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        result = method(**arguments)
        if not inspect.isawaitable(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()  # one for all calls: clients may be kept between them
        return self._loop.run_until_complete(result)


def main(descriptor: int, factory: str, options: str) -> None:
    end_before_daemon()
    channel = WorkerChannel(descriptor)
    environment, problem = None, ""
    try:
        environment = Environment(factory, msgspec.json.decode(options))
    except ConfigError as error:
        problem = str(error)
    except Exception as error:
        problem = f"environment.factory: {factory} raised {type(error).__name__}: {error}"
    while (frame := channel.receive()) is not None:
        call = msgspec.msgpack.decode(frame, type=Call)
        answer = Answer(problem=problem) if environment is None else environment.answer(call)
        try:
            channel.send(answer)
        except (TypeError, OverflowError, ValueError) as error:
            channel.send(Answer(problem=f"returned a value that cannot be sent: {error}"))


def _observation(value: Any) -> str | list[Any] | None:
    if value is None or isinstance(value, str | list):
        return value
    raise TypeError(f"reset returned a {type(value).__name__}; return text, a list of content parts, or None")


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a reply; a text is a message of the user's."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value or []
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise TypeError("reply returned no messages; return text, a list of messages with role and content, or None")
    return messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str | list)
    )


def _number(value: Any, method: str) -> float | None:
    if value is None:
        return None
    if not hasattr(value, "__float__"):
        raise TypeError(f"{method} returned a {type(value).__name__}; return a number, or None for missing")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{method} returned {number}; return a number up to {FLOAT32_MAX:.2g}, or None for missing")
    return number


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
