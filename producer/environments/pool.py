"""The environments of a producer: code of the user's or of a plugin that may block, each instance in a process of its own.

Guarantee: no call takes longer than its limit; an environment that hangs or dies is killed by its own process id and costs the
episode that it was in, and no process outlives the daemon. Processes are started when they are needed, at most
`environment.max_concurrent` beside those that are being killed, and serve one episode after the other. An episode gives back its
process and its slot in every case, also when it is cancelled.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from producer.environments.contract import EnvironmentFailedError, Environments
from producer.environments.worker import Answer, Call
from protocol.config.environment_servers import SERVERS
from protocol.config.functions import ENVIRONMENT_PLUGINS, load_plugin
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from protocol.gpu.nvml import environment_of
from protocol.runtime.child import ChildEndedError, ChildProcess, ChildProcesses
from protocol.runtime.logs import Throttle

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_HOPELESS = 8  # episodes in a row that failed
_METHODS = {"reward": "get_reward", "turn_reward": "get_turn_reward"}


@dataclass
class EnvironmentSession:
    """An environment for one episode. Its methods raise EnvironmentFailedError if the environment raises, hangs or has died."""

    process: ChildProcess
    key: str  # of its section
    call_timeout_s: float
    start_timeout_s: float  # that the first call has in addition
    is_usable: bool = True
    done: bool = False  # the environment has ended the episode

    async def reset(self, columns: dict[str, Any], _prompt_id: int = 0) -> str | list[Any] | None:
        """Begin an episode on a row of the dataset, and return the text that the environment adds to its prompt."""
        return (await self._ask(Call("reset", arguments=columns))).value  # type: ignore[no-any-return]

    async def call(self, tool: str, arguments: dict[str, Any]) -> tuple[str | list[Any], bool]:
        """Return the content of the tool's message, and whether the tool failed."""
        answer = await self._ask(Call("tool", tool, arguments))
        return answer.value, answer.raised

    async def reply(self, text: str) -> list[dict[str, Any]]:
        """Return the messages that answer a turn without calls; the episode is over if there are none."""
        return (await self._ask(Call("reply", arguments={"text": text}))).value  # type: ignore[no-any-return]

    async def reward(self) -> float | None:
        """Return the environment's own reward of the episode."""
        return (await self._ask(Call("reward"))).value  # type: ignore[no-any-return]

    async def turn_reward(self) -> float | None:
        """Return the environment's own reward of the last turn."""
        return (await self._ask(Call("turn_reward"))).value  # type: ignore[no-any-return]

    async def describe(self) -> tuple[list[dict[str, Any]], bool, bool, bool]:
        """Return the JSON schemas of the tools, and whether there are `get_reward`, `get_turn_reward` and `reply`."""
        tools, has_reward, rewards_turns, replies = (await self._ask(Call("describe"))).value
        return tools, has_reward, rewards_turns, replies

    async def _ask(self, call: Call) -> Answer:
        what = f"tool {call.name}" if call.kind == "tool" else _METHODS.get(call.kind, call.kind)
        if not self.is_usable:
            raise EnvironmentFailedError(f"{what}: the process of the environment has ended")
        self.is_usable = False  # until it has answered
        try:
            async with asyncio.timeout(self.call_timeout_s + self.start_timeout_s):
                answer = await self.process.ask(call, Answer)
        except TimeoutError:
            raise EnvironmentFailedError(
                f"{what} did not return within {self.key}.call_timeout_s={self.call_timeout_s:g} seconds and its process was "
                "killed"
            ) from None
        except ChildEndedError as error:
            raise EnvironmentFailedError(f"{what}: {error}") from None
        self.is_usable, self.start_timeout_s, self.done = True, 0.0, answer.done
        if answer.problem:
            raise EnvironmentFailedError(f"{what} {answer.problem}", is_outage=answer.is_outage)
        return answer


def environments_of(section: EnvironmentSection, *, rewards_turns: bool) -> Environments:
    """Return the environments of a factory: processes, or servers that a plugin connects to. `rewards_turns`: whether rewards of
    turns are of use."""
    if section.factory in SERVERS:
        plugin = load_plugin(ENVIRONMENT_PLUGINS, str(section.factory), f"{section.key}.factory")
        made: Environments = plugin(section, rewards_turns=rewards_turns)
        return made
    return EnvironmentPool(section)


class EnvironmentPool:
    """Keeps the processes of the factory of `section`. After the start `tools` has the JSON schemas of the tools, `rewards_turns`
    tells whether turns have rewards of their own, and `replies` whether turns without calls are answered."""

    def __init__(self, section: EnvironmentSection) -> None:
        assert section.factory is not None
        self._section = section
        self._factory = section.factory
        self._options = msgspec.json.encode(section.options).decode()
        self._environment = environment_of(section.gpu)
        self._slots = asyncio.Semaphore(section.max_concurrent)
        self._idle: list[ChildProcess] = []
        self._children = ChildProcesses(Throttle(logger))
        self._failures = 0  # of episodes, since one succeeded
        self._last_failure = ""
        self.tools: list[dict[str, Any]] = []
        self.rewards_turns = self.replies = False

    def problem(self) -> str | None:
        """Return why no episode can be played now, as far as the last ones tell."""
        if self._failures < _HOPELESS:
            return None
        return f"the last {self._failures} episodes of {self._section.key} failed: {self._last_failure}"

    async def start(self) -> None:
        """Start the first environment and ask it for its tools. Raise ConfigError if it cannot be imported or made, its tools
        have no schemas, or it does not fit the configuration."""
        try:
            async with self.session() as environment:
                self.tools, has_reward, self.rewards_turns, self.replies = await environment.describe()
        except EnvironmentFailedError as error:
            raise ConfigError(f"{self._section.key}.factory: {self._factory}: {error}") from error
        if has_reward != (self._section.reward_weight is not None):
            problem = "has no get_reward; add it, or name a reward function and remove the weight"
            if has_reward:
                problem = "has get_reward; set its weight, e.g. 1.0"
            raise ConfigError(f"{self._section.key}.reward_weight: {self._factory} {problem}")
        if self.tools and self._section.tool_parser is None:
            raise ConfigError(
                f"{self._section.key}.tool_parser: {self._factory} has tools; name vLLM's parser for the calls of this model, "
                "e.g. hermes"
            )

    async def close(self) -> None:
        await self._children.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Wait for a slot and hold an environment for the duration of the context. Raise EnvironmentFailedError if no process
        can be started."""
        async with self._slots:
            process, start_timeout_s = (self._idle.pop(), 0.0) if self._idle else (self._start(), _START_TIMEOUT_S)
            session = EnvironmentSession(process, self._section.key, self._section.call_timeout_s, start_timeout_s)
            try:
                yield session
                self._failures = 0
            except (EnvironmentFailedError, TimeoutError) as error:
                self._failures += 1
                self._last_failure = str(error) or "it took too long"
                raise
            finally:
                if session.is_usable:
                    self._idle.append(process)
                else:
                    self._children.terminate(process)

    def _start(self) -> ChildProcess:
        try:
            return self._children.start(
                "producer.environments.worker",
                self._factory,
                self._options,
                source=f"environment {self._factory}",
                environment=self._environment,
            )
        except ChildEndedError as error:
            raise EnvironmentFailedError(str(error)) from None
