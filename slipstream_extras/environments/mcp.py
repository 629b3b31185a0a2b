"""Tools of MCP servers as an environment, by the `mcp` package that comes with vLLM.

Guarantee: the policy has the tools that are allowed, and what a tool returns, or its error, as text. A server that was started by
its command ends with its environment's process, and so with the daemon. A call that a server does not answer in time is an error
that the policy sees; a server that is gone is an outage, which fails the episode, and the next one begins with a new server or
connection. Whatever a server sends stays in the environment's process, apart from the text of an answer.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

import httpx2
import msgspec
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent, Tool

from producer.environments.contract import OutageError
from protocol.errors import ConfigError

_MAX_PAGES = 100
_PING_S, _CLOSE_S = 10.0, 5.0
_KEY = "environment.options.servers"


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """A server: the command that starts it, or the URL at which it listens. Of the daemon's variables a command gets those of
    `env` and a few harmless ones; `headers_env` names those that have the values of headers. With `per_episode` each episode
    begins with a new server, or connection."""

    command: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    url: Annotated[str, msgspec.Meta(pattern="^https?://")] | None = None
    tools: list[str] | None = None
    env: list[str] = []
    headers_env: dict[str, str] = {}
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    per_episode: bool = False

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give one of command and url")
        if (self.env and self.url) or (self.headers_env and self.command):
            raise ValueError("`env` is for a command, and `headers_env` for a url")
        if missing := [name for name in [*self.env, *self.headers_env.values()] if name not in os.environ]:
            raise ValueError(f"the producer has no variable {missing[0]}; set it, or remove its name")

    @property
    def name(self) -> str:
        return re.sub("//[^/]*@", "//", self.url) if self.url else " ".join(self.command or [])  # no password is told

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            target: Any
            if self.command is not None:
                variables = {name: os.environ[name] for name in self.env}
                target = StdioServerParameters(command=self.command[0], args=self.command[1:], env=variables)
            else:
                headers = {name: os.environ[variable] for name, variable in self.headers_env.items()}
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=None))
                target = streamable_http_client(str(self.url), http_client=http)
            yield await stack.enter_async_context(Client(target))


class Server:
    """A connection to one server, held by a task of its own."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tools: dict[str, Tool] = {}
        self._client: Client | None = None
        self._holding: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Connect unless there is a connection. Raises OutageError if that fails, ConfigError if an allowed tool is missing."""
        if self._client is not None:
            return
        connected = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(connected))
        await asyncio.wait([self._holding, connected], return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            error = self._holding.exception()
            raise OutageError(f"cannot connect to {self.options.name}: {_reason(error)}")
        try:
            self.tools = self._allowed(await self._listed(connected.result()))
        except Exception as error:
            await self.close()
            if isinstance(error, ConfigError):
                raise
            raise OutageError(f"{self.options.name} does not list its tools: {_reason(error)}") from error
        self._client = connected.result()

    def _allowed(self, listed: list[Tool]) -> dict[str, Tool]:
        tools = {tool.name: tool for tool in listed}
        allowed = tools if self.options.tools is None else self.options.tools
        if missing := [name for name in allowed if name not in tools]:
            raise ConfigError(
                f"{_KEY}: {self.options.name} has no tool {missing[0]!r}; it has {', '.join(tools) or 'none'}"
            )
        return {name: tools[name] for name in allowed}

    async def close(self) -> None:
        """Close the connection. Ends the process if a server, or what is left of one, holds it."""
        if self._holding is not None:
            self._holding.cancel()
            done, _ = await asyncio.wait([self._holding], timeout=_CLOSE_S)
            if not done:
                raise SystemExit(f"the connection to {self.options.name} does not close")
            await asyncio.gather(self._holding, return_exceptions=True)  # the call that met an error has told it
        self._client = self._holding = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result. Raises RuntimeError with its text if it is an error, and OutageError if the server
        is gone."""
        assert self._client is not None
        try:
            result = await self._client.call_tool(name, arguments, self.options.timeout_s)
        except Exception as error:
            await self._check_alive()
            raise RuntimeError(_reason(error)) from None
        if result.is_error:
            raise RuntimeError(text_of(result))
        return text_of(result)

    async def _hold(self, connected: "asyncio.Future[Client]") -> None:
        async with self.options.connection() as client:
            connected.set_result(client)
            await asyncio.Event().wait()

    async def _listed(self, client: Client) -> list[Tool]:
        tools, cursor = list[Tool](), None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                break
        return tools

    async def _check_alive(self) -> None:
        assert self._client is not None
        try:
            async with asyncio.timeout(_PING_S):
                await self._client.list_tools(cache_mode="refresh")
        except Exception as error:
            await self.close()
            raise OutageError(f"the MCP server {self.options.name} is gone: {_reason(error)}") from error


class McpEnvironment:
    """Has the tools of all servers. An episode changes nothing here; rewards come from reward functions."""

    def __init__(self, servers: list[dict[str, Any]]) -> None:
        if not servers:
            raise ConfigError(f"{_KEY}: name a server")
        self._servers = [Server(options) for options in _options(servers)]
        self._places: dict[str, Server] = {}

    async def get_tools(self) -> list[dict[str, Any]]:
        """Connect, and return the JSON schemas of the tools. Raises ConfigError if two have one name, or there are none."""
        schemas, self._places = [], {}
        for server in self._servers:
            await server.connect()
            for name, tool in server.tools.items():
                if name in self._places:
                    raise ConfigError(f"{_KEY}: two servers have a tool {name!r}; choose with `tools`")
                self._places[name] = server
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                schemas.append({"type": "function", "function": function})
        if not schemas:
            raise ConfigError(f"{_KEY}: the servers have no tools")
        return schemas

    async def reset(self, **_: Any) -> None:
        for server in self._servers:
            if server.options.per_episode:
                await server.close()
        await self.get_tools()

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._places:
            raise ValueError(f"Tool {name} not found.")
        return await self._places[name].call(name, arguments)


def _options(servers: list[dict[str, Any]]) -> list[Options]:
    try:
        return msgspec.convert(servers, list[Options])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_KEY}: {error}") from error


def text_of(result: CallToolResult) -> str:
    """Return the texts of a result and the kinds of other parts, one a line, or the structured content if that is all."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reason(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
