"""The servers of OpenEnv that a producer plays with.

Guarantee: at most `environment.max_concurrent` sessions are open at once, each at the server with the fewest of them. One that is
full is asked again, for at most `environment.episode_timeout_s`; if none answers, for at most `environment.call_timeout_s`.
Servers that are down at the start, speak another protocol or play different environments end the producer.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from producer.environments.contract import EnvironmentFailedError
from producer.rewards.pool import pause_s
from protocol.config.environment_servers import OpenEnvOptions
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from protocol.http_client import HttpClient, ServerLostError, ServerMismatchError, ServerRefusedError, open_session
from slipstream_extras.environments.openenv.session import LARGEST_ANSWER_BYTES, OpenEnvSession, ServerFullError

logger = logging.getLogger(__name__)

_OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")  # titles of the actions of MCP environments
_CLOSE_S = 1.0  # for the server's part in the end of a session


class _Schema(msgspec.Struct):
    action: dict[str, Any]
    observation: dict[str, Any] = {}


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        return {"type": "function", "function": function}


@dataclass(eq=False)
class _Server:
    url: str
    num_sessions: int = 0


class OpenEnvPool:
    """The environments of a section with `factory: openenv`."""

    def __init__(self, section: EnvironmentSection, *, rewards_turns: bool) -> None:
        self._section, self._key = section, section.key
        self._options = OpenEnvOptions.model_validate(section.options)
        self._servers = [_Server(url.rstrip("/")) for url in self._options.url]
        self._slots = asyncio.Semaphore(section.max_concurrent)
        self._http: aiohttp.ClientSession | None = None
        self._action_field: str | None = None
        self._problem: str | None = None
        self.tools: list[dict[str, Any]] = []
        self.rewards_turns, self.replies = rewards_turns, False

    def problem(self) -> str | None:
        """Return why no session could be opened lately."""
        return self._problem

    async def start(self) -> None:
        self._http = open_session(self._options, f"{self._key}.options")
        schemas = [await self._schema(server.url) for server in self._servers]
        for server, schema in zip(self._servers, schemas, strict=True):
            if schema.action != schemas[0].action:
                raise ConfigError(
                    f"{self._key}.options.url: {server.url} has other actions than {self._servers[0].url}; name servers of one "
                    "environment"
                )
        fields = schemas[0].observation.get("properties") or {}
        if (name := self._options.observation) is not None and fields and name not in fields:
            raise ConfigError(f"{self._key}.options.observation: there is no {name!r}; there are {', '.join(fields)}")
        if self._options.action is None and schemas[0].action.get("title") in _OF_TOOLS:
            self.tools = [tool.described() for tool in await self._list_tools()]
        else:
            self.replies, self._action_field = True, self._chosen_field(schemas[0].action)
        if self.tools and self._section.tool_parser is None:
            raise ConfigError(
                f"{self._key}.tool_parser: the environment has tools; name vLLM's parser for the model's calls, e.g. hermes"
            )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[OpenEnvSession]:
        async with self._slots, AsyncExitStack() as stack:
            yield await self._opened(stack)

    async def _opened(self, stack: AsyncExitStack) -> OpenEnvSession:
        began = time.monotonic()
        for attempt in itertools.count(1):
            name, problem = "call_timeout_s", ""
            for server in sorted(self._servers, key=lambda each: each.num_sessions):
                try:
                    session = await stack.enter_async_context(self._at(server))
                except ServerFullError as error:
                    name, problem = "episode_timeout_s", f"{server.url} is full: {error}"
                except EnvironmentFailedError as error:
                    problem = problem or str(error)
                else:
                    self._problem = None
                    return session
            if time.monotonic() - began > (limit_s := getattr(self._section, name)):
                self._problem = f"no session of OpenEnv within {self._key}.{name}={limit_s:g} seconds: {problem}"
                raise EnvironmentFailedError(self._problem, is_outage=True)
            await asyncio.sleep(pause_s(attempt))
        raise AssertionError

    @asynccontextmanager
    async def _at(self, server: _Server) -> AsyncIterator[OpenEnvSession]:
        """Open a session of this server. Raises ServerFullError if it has no room."""
        assert self._http is not None
        server.num_sessions += 1
        try:
            limits = aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)
            try:
                async with asyncio.timeout(self._section.call_timeout_s):
                    socket = await self._http.ws_connect(
                        f"{server.url}/ws", timeout=limits, max_msg_size=LARGEST_ANSWER_BYTES
                    )
            except (aiohttp.ClientError, OSError) as error:
                raise EnvironmentFailedError(
                    f"no connection to {server.url}: {error or type(error).__name__}"
                ) from None
            limit_s = self._section.call_timeout_s
            session = OpenEnvSession(
                socket, server.url, self._key, self._options, limit_s, self.replies, self._action_field
            )
            async with session:
                await session.ask("state")  # a server refuses a session after it was opened
                yield session
        finally:
            server.num_sessions -= 1

    async def _schema(self, url: str) -> _Schema:
        assert self._http is not None
        http = HttpClient(self._http, url, self._section.call_timeout_s, f"{self._key}.options")
        try:
            return await http.get("/schema", _Schema)
        except ServerLostError as error:
            raise ConfigError(f"{self._key}.options.url: {url} {error}; start the server first") from error
        except ServerMismatchError as error:
            raise ConfigError(f"{self._key}.options.url: {url} {error}") from error
        except ServerRefusedError as error:
            raise ConfigError(
                f"{self._key}.options.url: {url} is no server of OpenEnv: /schema: {error}; correct the address"
            ) from error

    async def _list_tools(self) -> list[_Tool]:
        try:
            async with self.session() as session:
                tools = msgspec.convert(await session.tools(), list[_Tool])
        except (EnvironmentFailedError, msgspec.ValidationError) as error:
            raise ConfigError(f"{self._key}.options.url: the server lists no tools: {error}") from error
        for name, count in Counter(tool.name for tool in tools).items():
            if count > 1:
                raise ConfigError(f"{self._key}.options.url: the server has {count} tools {name!r}; rename one there")
        return tools

    def _chosen_field(self, action: dict[str, Any]) -> str | None:
        """Return the field of an action that the text of a turn fills, or None if the text is the whole action."""
        fields, name = [*(action.get("properties") or {})], self._options.action
        if name == "json" and name not in fields:
            return None
        if name is None:
            required = action.get("required") or []
            if len(required) == 1:
                return str(required[0])
            raise ConfigError(
                f"{self._key}.options.action: an action has to have {', '.join(required) or 'no field'}; name the field for "
                f"the text of a turn ({', '.join(fields)}), or `json` if the text is the whole action"
            )
        if name not in fields:
            raise ConfigError(f"{self._key}.options.action: there is no {name!r}; there are {', '.join(fields)}")
        return name
