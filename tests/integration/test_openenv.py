"""The player of OpenEnv against servers of the real package, in processes of their own."""

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from producer.environments.contract import EnvironmentFailedError
from protocol.config.rewards import EnvironmentSection
from slipstream_extras.environments.openenv.pool import OpenEnvPool
from tests.tools import python_with
from tests.unit.protocol.channel_harness import reserve_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SERVERS = Path(__file__).parent / "other_environments" / "openenv_servers.py"


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """The addresses of servers for guesses and for tools. Each takes two sessions at once."""
    python = python_with("openenv")
    with ExitStack() as stack:
        ports = [reserve_port(stack) for _ in range(2)]
        servers = stack.enter_context(subprocess.Popen([python, str(SERVERS), *map(str, ports)]))
        try:
            for port in ports:
                while servers.poll() is None:
                    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.2)
            guess, tools = (f"http://127.0.0.1:{port}" for port in ports)
            yield guess, tools
        finally:
            servers.kill()


@asynccontextmanager
async def started(url: str, **settings: Any) -> AsyncIterator[OpenEnvPool]:
    values = {"factory": "openenv", "options": {"url": url}} | settings
    pool = OpenEnvPool(EnvironmentSection.model_validate(values), rewards_turns=True)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def test_numbers_are_guessed_by_text(urls: tuple[str, str]) -> None:
    async def episode(pool: OpenEnvPool, seed: int) -> tuple[float | None, bool]:
        async with pool.session() as session:
            assert await session.reset({}, seed) == " guess"
            assert await session.reply("8") == [{"role": "user", "content": "wrong"}]
            [refused] = await session.reply("eight")
            assert "guess: Input should be a valid integer" in refused["content"]
            assert await session.reply(str(seed % 10)) == [{"role": "user", "content": "right"}]
            return await session.reward(), session.done

    async def body(url: str) -> None:
        async with started(url) as pool:
            assert (pool.tools, pool.replies) == ([], True)
            assert await asyncio.gather(*(episode(pool, 10 + number) for number in range(5))) == [(0.75, True)] * 5
            async with pool.session() as session:
                await session.reset({}, 1)
                with pytest.raises(EnvironmentFailedError, match="below zero"):
                    await session.reply("-1")

    asyncio.run(body(urls[0]))


def test_tools_are_called(urls: tuple[str, str]) -> None:
    async def body(url: str) -> None:
        async with started(url, tool_parser="hermes") as pool:
            [tool] = pool.tools
            assert (tool["function"]["name"], pool.replies) == ("add", False)
            assert tool["function"]["parameters"]["properties"]["a"]["type"] == "integer"
            async with pool.session() as session:
                await session.reset({}, 4)
                assert await session.call("add", {"a": 3}) == ("7", False)
                content, failed = await session.call("add", {"a": "x"})
                assert failed
                assert "integer" in content
                content, failed = await session.call("sell", {})
                assert failed
                assert await session.call("add", {"a": 1}) == ("8", False)

    asyncio.run(body(urls[1]))
