"""A run whose episodes are played with servers: of MCP, of OpenEnv, and of a model that is the user. Both daemons are real, vLLM
is scripted, and some servers misbehave."""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slipstream.cli import run as slipstream
from slipstream.run_reader import RunReader
from tests.openenv_server import OpenEnvServer, running
from tests.threaded import in_thread

from .models import char_tokenizer
from .pair import Daemon, end_well
from .playing_producer import END, ZERO
from .test_pair import read_steps, write_run

pytestmark = pytest.mark.integration

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}<eos>{% endfor %}"
)
MCP_SERVER = Path(__file__).parents[1] / "mcp_server.py"
CODE = """
def talk(completions, environment, **_):
    return [float(len("".join(each["content"] for each in messages)) + k) for k, messages in enumerate(completions)]
"""


class Servers:
    """Of OpenEnv one that is right, one that ends sessions in mid-episode at first, and one whose rewards are no numbers; of a
    model one that is down at first."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.conversations: list[list[dict[str, Any]]] = []

    def loses(self, asked: dict[str, Any], answer: dict[str, Any]) -> Any:
        if asked["type"] == "step":
            self.asked["lost"] += 1
            return b"" if self.asked["lost"] <= 2 else answer
        return answer

    def rewards_wrongly(self, asked: dict[str, Any], answer: dict[str, Any]) -> Any:
        if asked["type"] == "step":
            answer["data"]["reward"] = [1.0]
        return answer

    async def talk(self, request: web.Request) -> web.Response:
        self.asked["user"] += 1
        if self.asked["user"] <= 2:
            return web.Response(status=500)
        messages = (await request.json())["messages"]
        self.conversations.append(messages)
        said = "BYE" if len(messages) > 3 else f"why {messages[-1]['content']}?"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": said}}]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[dict[str, str]]:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self.talk)])
        async with AsyncExitStack() as stack:
            served = {
                name: await stack.enter_async_context(running(OpenEnvServer(says=says)))
                for name, says in (
                    ("guess", lambda _, answer: answer),
                    ("lost", self.loses),
                    ("wrong", self.rewards_wrongly),
                )
            }
            server = await stack.enter_async_context(TestServer(app))
            yield served | {"user": str(server.make_url("")).rstrip("/")}


def environment(name: str, factory: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "factory": factory, "max_turns": 3, "max_concurrent": 2} | settings


def test_servers_play_and_none_that_misbehaves_stops_the_run(short_dir: Path, daemons: list[Daemon]) -> None:
    servers = Servers()
    names = ("rooms", "guess", "lost", "wrong", "user")
    rows = [
        {"prompt": [{"role": "user", "content": f"{number}+1="}], "environment": name, "goal": "tea"}
        for number in range(8)
        for name in names
    ]
    with in_thread(servers.running) as urls:
        tools = {"servers": [{"command": [sys.executable, str(MCP_SERVER)], "tools": ["look"]}]}
        user = {"url": urls["user"], "model": "m", "prompt": "You want {goal}.", "stop": "BYE", "retries": 0}
        config = write_run(
            short_dir, "qwen2", rows, CODE,
            sampling={"num_generations": 2, "max_completion_length": 60}, trainer={"max_steps": 16, "save_steps": 16},
            pipeline={"groups_per_step": 2, "max_data_attempts": 1, "max_failed_share": 1.0, "infra_backoff_s": 0.05},
            environments=[
                environment("rooms", "mcp", tool_parser="hermes", options=tools, max_concurrent=1),
                *(environment(name, "openenv", options={"url": urls[name]}) for name in ("guess", "lost", "wrong")),
                environment("user", "simulated_user", options=user),
            ],
        )  # fmt: skip
        (short_dir / "model" / "chat_template.jinja").write_text(TEMPLATE)
        for module, name in (("tests.integration.playing_producer", "producer"), ("consumer.app.cli", "trainer")):
            daemons.append(Daemon(module, short_dir / f"{name}.log", "--config", str(config)))
        end_well(daemons[1], daemons[0])

    assert len(read_steps(short_dir)) == 16
    with closing(RunReader(short_dir / "run").journal()) as journal:
        given_up = [(names[each.prompt_id % 5], each.failure, each.detail) for each in journal.dead_letters()]
    assert {(name, failure) for name, failure, _ in given_up} == {("wrong", "data")}
    assert all(urls["wrong"] in detail and "$.reward" in detail for _, _, detail in given_up)

    trained, tokenizer = short_dir / "trained.jsonl", char_tokenizer()
    arguments = ["journal", "--run", str(short_dir / "run"), "export", "--state", "trained", "--to", str(trained)]
    assert slipstream(arguments) == 0
    groups = [(names[group["prompt_id"] % 5], group) for group in map(json.loads, trained.read_text().splitlines())]
    assert {name for name, _ in groups} == {"rooms", "guess", "lost", "user"}
    for name, group in groups:
        column = group["reward_names"].index(name) if name in group["reward_names"] else None
        for ids, rewards in zip(group["completion_ids"], group["rewards"], strict=True):
            digits = [token - ZERO for token, end in pairwise(ids) if end == END and ZERO <= token <= ZERO + 9]
            if column is not None:  # the server's secret is the number of the prompt, without its tens
                right = group["prompt_id"] % 10
                assert rewards[column] == sum(1.0 if digit == right else -0.25 for digit in digits)
    for name, text in (("rooms", "door"), ("guess", "wrong"), ("user", "why")):
        shown = [tokenizer.decode(ids) for owner, group in groups if owner == name for ids in group["completion_ids"]]
        assert any(text in each for each in shown), name
    for messages in servers.conversations:
        assert [each["role"] for each in messages] == [
            "system",
            *islice(cycle(("assistant", "user")), len(messages) - 1),
        ]
        assert messages[0]["content"] == "You want tea."
