"""Environments whose tools are those of real MCP servers, each in a process of its own."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from mcp.types import CallToolResult, ImageContent, ListToolsResult, TextContent, Tool

from producer.environments.contract import EnvironmentFailedError, OutageError
from producer.environments.pool import EnvironmentPool
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from slipstream_extras.environments.mcp import McpEnvironment, Options, text_of
from tests.unit.producer.loop import asynchronous
from tests.unit.protocol.channel_harness import reserve_port

SERVER = Path(__file__).parents[3] / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER)]
ALLOWED = ["look", "picture", "refuse", "wait", "die", "process", "variable"]


@asynccontextmanager
async def environments(*servers: dict[str, Any], **settings: Any) -> AsyncIterator[EnvironmentPool]:
    section = {"factory": "mcp", "tool_parser": "hermes", "max_concurrent": 1, "options": {"servers": list(servers)}}
    pool = EnvironmentPool(EnvironmentSection.model_validate(section | settings))
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.long
@asynchronous
async def test_a_server_by_command_gives_its_allowed_tools_and_ends_with_the_pool(monkeypatch):
    monkeypatch.setenv("ROOM", "kitchen")
    async with environments({"command": COMMAND, "tools": ALLOWED, "env": ["ROOM"], "timeout_s": 3.0}) as pool:
        await pool.start()
        assert [tool["function"]["name"] for tool in pool.tools] == ALLOWED
        look = pool.tools[0]["function"]
        assert (look["description"], look["parameters"]["properties"]["at"]["type"]) == ("Looks at a thing.", "string")
        async with pool.session() as environment:
            assert await environment.reset({"prompt": []}) is None
            assert await environment.call("look", {"at": "door"}) == ("door no. 1", False)
            assert await environment.call("picture", {}) == ("a cat\n[image]", False)
            assert await environment.call("variable", {"name": "ROOM"}) == ("kitchen", False)
            for name, arguments in [("refuse", {}), ("look", {}), ("look", {"at": 3}), ("unheard", {})]:
                said, failed = await environment.call(name, arguments)
                assert failed, name
                assert "error" in said
            said, failed = await environment.call("wait", {"seconds": 4.0})
            assert failed, "it did not answer in time, and lives"
            number = int((await environment.call("process", {}))[0])
            async with asyncio.timeout(30):
                with pytest.raises(EnvironmentFailedError, match="is gone") as gone_for:
                    await environment.call("die", {})
            assert gone_for.value.is_outage
        await gone(number)
        async with pool.session() as environment:
            await environment.reset({})
            assert await environment.call("look", {"at": "wall"}) == ("wall no. 1", False)
            number = int((await environment.call("process", {}))[0])
    await gone(number)


async def gone(number: int) -> None:
    async with asyncio.timeout(20):
        while psutil.pid_exists(number):  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.02)


@pytest.mark.long
@asynchronous
async def test_a_server_by_command_may_be_new_in_each_episode():
    environment, numbers = McpEnvironment([{"command": COMMAND, "tools": ["process"], "per_episode": True}]), []
    for _ in range(2):
        await environment.reset(prompt=[])
        numbers.append(int(await environment.call_tool("process", {})))
    await environment.close()
    assert numbers[0] != numbers[1]
    assert not any(map(psutil.pid_exists, numbers))


async def started(port: int) -> asyncio.subprocess.Process:
    """Start a server that listens."""
    process = await asyncio.create_subprocess_exec(*COMMAND, str(port))
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                return process
            await asyncio.sleep(0.05)


@pytest.mark.long
@asynchronous
async def test_a_server_by_url_may_end_and_come_back(stack):
    port = reserve_port(stack)
    one = {"url": f"http://127.0.0.1:{port}/mcp", "tools": ["look"]}
    serving = await started(port)
    try:
        refused = [
            ([one | {"tools": ["fly"]}], "no tool 'fly'; it has look, "),
            ([one, one], "two servers have a tool 'look'"),
            ([one | {"tools": []}], "have no tools"),
        ]
        for servers, said in refused:
            environment = McpEnvironment(servers)
            with pytest.raises(ConfigError, match=said):
                await environment.get_tools()
            await environment.close()
        environment = McpEnvironment([one])
        await environment.reset()
        assert await environment.call_tool("look", {"at": "door"}) == "door no. 1"
        serving.kill()
        await serving.wait()
        with pytest.raises(OutageError, match=f"{port}/mcp is gone"):
            await environment.call_tool("look", {"at": "door"})
        with pytest.raises(OutageError, match=f"cannot connect to .*{port}"):
            await environment.reset()
        serving = await started(port)
        await environment.reset()
        assert await environment.call_tool("look", {"at": "door"}) == "door no. 1"
        await environment.close()
    finally:
        if serving.returncode is None:
            serving.kill()
            await serving.wait()


@pytest.mark.long
@asynchronous
async def test_a_command_that_is_not_there_ends_the_start_with_the_reason():
    async with environments({"command": ["/no/such/server"]}) as pool:
        with pytest.raises(ConfigError, match=r"environment\.factory: mcp: .*cannot connect to /no/such/server"):
            await pool.start()


class Listing:
    """A client whose first listing of tools fails."""

    num_asked = num_open = 0

    async def list_tools(self, **_: Any) -> ListToolsResult:
        Listing.num_asked += 1
        if Listing.num_asked == 1:
            raise RuntimeError("internal error")
        return ListToolsResult(tools=[Tool(name="look", input_schema={"type": "object"})])


@asynchronous
async def test_a_server_that_fails_to_list_its_tools_is_an_outage_and_asked_again(monkeypatch):
    @asynccontextmanager
    async def connection(_: Options) -> AsyncIterator[Listing]:
        Listing.num_open += 1
        try:
            yield Listing()
        finally:
            Listing.num_open -= 1

    monkeypatch.setattr(Options, "connection", connection)
    environment = McpEnvironment([{"url": "http://a/mcp"}])
    with pytest.raises(OutageError, match="internal error"):
        await environment.reset()
    assert Listing.num_open == 0
    await environment.reset()
    assert [tool["function"]["name"] for tool in await environment.get_tools()] == ["look"]
    await environment.close()
    assert (Listing.num_asked, Listing.num_open) == (2, 0)


OLD = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = {"protocolVersion": "1999-01-01", "capabilities": {}, "serverInfo": {"name": "old", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.long
@asynchronous
async def test_a_server_of_another_version_of_the_protocol_ends_the_start():
    async with environments({"command": [sys.executable, "-c", OLD]}) as pool:
        with pytest.raises(ConfigError, match=r"(?s)environment\.factory: mcp: .*protocol version .*1999-01-01"):
            await pool.start()


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({}, "one of command and url"),
        ({"command": ["a"], "url": "http://a"}, "one of command and url"),
        ({"command": []}, "length"),
        ({"url": "ftp://a"}, "regex"),
        ({"url": "http://a", "env": ["HOME"]}, "`env` is for a command"),
        ({"command": ["a"], "headers_env": {"Authorization": "HOME"}}, "`headers_env` for a url"),
        ({"command": ["a"], "env": ["NO_SUCH_VARIABLE"]}, "no variable NO_SUCH_VARIABLE"),
        ({"command": ["a"], "timeout_s": 0}, "timeout_s"),
        ({"command": ["a"], "tool": ["b"]}, "tool"),
    ],
)
def test_options_of_a_server_are_checked(server, said):
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(server, Options)


def test_no_message_has_the_password_of_a_url():
    assert Options(url="https://me:secret@host/@tools/mcp").name == "https://host/@tools/mcp"


def test_an_environment_needs_a_server():
    with pytest.raises(ConfigError, match="name a server"):
        McpEnvironment([])
    with pytest.raises(ConfigError, match=r"environment\.options\.servers: .*`tool`"):
        McpEnvironment([{"command": ["a"], "tool": ["b"]}])


@pytest.mark.parametrize(
    ("content", "structured", "text"),
    [
        ([TextContent(type="text", text="a"), TextContent(type="text", text="b")], None, "a\nb"),
        ([ImageContent(type="image", data="", mime_type="image/png")], {"a": 1}, "[image]"),
        ([], {"é": 1}, '{"é": 1}'),
        ([], None, ""),
    ],
)
def test_a_result_is_text(content, structured, text):
    assert text_of(CallToolResult(content=content, structured_content=structured)) == text
