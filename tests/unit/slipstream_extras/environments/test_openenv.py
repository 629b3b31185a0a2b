"""The player of OpenEnv against a stand-in of its servers: what an episode gets, and what it costs when a server misbehaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from producer.environments.contract import EnvironmentFailedError
from producer.environments.pool import environments_of
from producer.groups import Rollouts
from producer.rollouts.engine_access import Progress
from protocol.config.environment_servers import OpenEnvOptions
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from slipstream_extras.environments.openenv.pool import OpenEnvPool
from slipstream_extras.environments.openenv.session import OpenEnvSession, _content
from tests.openenv_server import ADD, GUESS, TOOLS, OpenEnvServer, running
from tests.unit.producer.loop import asynchronous, settle, until
from tests.unit.producer.rollouts.test_episodes import Setup, sampled_text

CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_extras.environments.openenv.pool.pause_s", lambda _: 0.01)


def pool_of(url: str | list[str], options: dict[str, Any] | None = None, **settings: Any) -> OpenEnvPool:
    values = {"factory": "openenv", "options": {"url": url} | (options or {})} | settings
    return OpenEnvPool(EnvironmentSection.model_validate(values), rewards_turns=False)


@asynccontextmanager
async def started(
    server: OpenEnvServer, options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[OpenEnvPool]:
    async with running(server) as url:
        pool = pool_of(url, options, **settings)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()
    assert server.num_sessions == 0


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@asynchronous
async def test_texts_of_turns_are_actions_until_the_server_says_done() -> None:
    server = OpenEnvServer()
    async with started(server, {"arguments": ["level"]}) as pool:
        assert (pool.tools, pool.replies) == ([], True)
        async with pool.session() as session:
            assert await session.reset({"level": "hard", "answer": "x"}, 17) == " guess"
            assert (await session.reply("3"), session.done) == (user("wrong"), False)
            [refused] = await session.reply("three")
            assert "guess: Input should be digits" in refused["content"]
            assert await session.turn_reward() == -0.25
            assert await session.turn_reward() is None
            assert (await session.reply("7"), session.done) == (user("right"), True)
            assert await session.reply("7") == []
            assert (await session.turn_reward(), await session.reward()) == (1.0, 0.75)
        assert server.resets == [{"seed": 17, "level": "hard"}]
        await until(lambda: server.num_sessions == 0)


@pytest.mark.parametrize(("how", "reward"), [("sum", 0.5), ("last", 1.0), ("max", 1.0)])
@asynchronous
async def test_the_reward_of_an_episode_is_made_of_those_of_its_steps(how: str, reward: float) -> None:
    async with started(OpenEnvServer(), {"reward": how}) as pool, pool.session() as session:
        await session.reset({}, 4)
        assert await session.reward() == 0.0
        await session.reply("1")
        assert await session.reward() == -0.25
        await session.reply("2")
        assert await session.reward() == (-0.5 if how == "sum" else -0.25)
        await session.reply("4")
        assert await session.reward() == reward


@asynchronous
async def test_an_episode_that_the_server_ends_without_a_reward_has_none() -> None:
    def says(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        answer["data"]["reward"] = None
        return answer

    async with started(OpenEnvServer(says=says)) as pool, pool.session() as session:
        await session.reset({}, 4)
        await session.reply("4")
        assert (session.done, await session.reward(), await session.turn_reward()) == (True, None, None)


@asynchronous
async def test_siblings_of_a_group_have_one_task_also_by_a_column() -> None:
    server = OpenEnvServer()
    async with started(server, {"seed": "task"}) as pool:
        for _ in range(2):
            async with pool.session() as session:
                await session.reset({"task": 5}, 17)
        async with pool.session() as session:
            with pytest.raises(EnvironmentFailedError, match="no column 'task'"):
                await session.reset({}, 17)
    assert server.resets == [{"seed": 5}] * 2


@asynchronous
async def test_tools_are_listed_and_called() -> None:
    async with started(OpenEnvServer(TOOLS), tool_parser="hermes") as pool:
        function = {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
        assert (pool.tools, pool.replies) == ([{"type": "function", "function": function}], False)
        async with pool.session() as session:
            await session.reset({}, 0)
            assert await session.call("add", {"a": 3}) == ("3", False)
            assert await session.call("add", {"a": "x"}) == ("{'error': 'a is no number'}", True)
            assert (await session.call("add", {"a": 0}), session.done) == (("3", False), True)
            assert await session.turn_reward() == 1.0
            assert await session.reply("bye") == []


@pytest.mark.parametrize(
    ("result", "content", "failed"),
    [
        ("text", "text", False),
        ({"data": None, "content": [{"type": "text", "text": "a"}, {"text": "b"}], "is_error": True}, "a\nb", True),
        ({"content": []}, '{"content": []}', False),
        ([1, 2], "[1, 2]", False),
        (None, "null", False),
    ],
)
@asynchronous
async def test_a_result_is_what_the_tool_returned(result: Any, content: str, failed: bool) -> None:
    def says(asked: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if asked.get("data", {}).get("type") == "call_tool":
            answer["data"]["observation"] = {"result": result}
        return answer

    async with started(OpenEnvServer(TOOLS, says=says), tool_parser="hermes") as pool, pool.session() as session:
        await session.reset({}, 0)
        assert await session.call("add", {"a": 3}) == (content, failed)


@asynchronous
async def test_an_action_may_be_the_whole_text() -> None:
    async with started(OpenEnvServer(), {"action": "json"}) as pool, pool.session() as session:
        await session.reset({}, 4)
        for wrong in ("4", "not json", "[4]"):
            [refused] = await session.reply(wrong)
            assert "JSON object" in refused["content"]
        assert await session.reply('{"guess": "4"}') == user("right")


@pytest.mark.parametrize(
    ("observation", "field", "shown"),
    [
        ({"said": "a", "left": 2, "metadata": {"x": 1}, "hint": None}, None, '{"said": "a", "left": 2}'),
        ({"said": {"left": 2}}, None, '{"left": 2}'),
        ({"said": "a", "left": 2}, "said", "a"),
        ({"said": None, "left": 2}, "said", None),
        ({"metadata": {}}, None, None),
    ],
)
@asynchronous
async def test_what_the_policy_sees_of_an_observation(observation: Any, field: str | None, shown: str | None) -> None:
    def says(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"data": {"observation": observation}} if answer["type"] == "observation" else answer

    options = {"observation": field} if field else {}
    async with started(OpenEnvServer(says=says), options) as pool, pool.session() as session:
        assert await session.reset({}, 4) == shown
        assert await session.reply("4") == user(shown or "")


@asynchronous
async def test_sessions_wait_for_room_and_go_to_the_server_with_the_fewest() -> None:
    first, second = OpenEnvServer(capacity=2), OpenEnvServer(capacity=1)
    async with running(first) as one, running(second) as two:
        pool = pool_of([one, two])
        await pool.start()

        async def episode(number: int) -> str | None:
            async with pool.session() as session:
                await asyncio.sleep(0.02)
                return await session.reset({}, number)

        assert await asyncio.gather(*map(episode, range(8))) == [" guess"] * 8
        assert (first.most_sessions, second.most_sessions) == (2, 1)
        await pool.close()


@asynchronous
async def test_at_most_so_many_sessions_at_once() -> None:
    server = OpenEnvServer()
    async with started(server, max_concurrent=2) as pool:

        async def episode(number: int) -> None:
            async with pool.session():
                await asyncio.sleep(0.02)

        await asyncio.gather(*map(episode, range(5)))
    assert server.most_sessions == 2


@asynchronous
async def test_a_server_that_stays_full_or_is_gone_fails_the_episode() -> None:
    server = OpenEnvServer(capacity=1)
    async with running(server) as url:
        pool = pool_of(url, episode_timeout_s=1.0, call_timeout_s=0.5)
        await pool.start()
        async with pool.session():
            with pytest.raises(EnvironmentFailedError, match=r"episode_timeout_s=1 .* full: no room"):
                async with pool.session():
                    pass
        await until(lambda: server.num_sessions == 0)
        async with pool.session():
            assert pool.problem() is None
    with pytest.raises(EnvironmentFailedError, match=r"call_timeout_s=0\.5 .* no connection"):
        async with pool.session():
            pass
    assert pool.problem()
    await pool.close()


@pytest.mark.long
@asynchronous
async def test_a_session_outlives_a_long_turn_of_the_policy() -> None:
    """A server ends the session of a client that does not answer its pings."""
    async with started(OpenEnvServer(heartbeat_s=0.5)) as pool, pool.session() as session:
        await session.reset({}, 4)
        await asyncio.sleep(1.2)
        assert await session.reply("4") == user("right")


STEP = {"observation": {"said": "x"}, "reward": 1.0, "done": False}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "lost"),
        (None, r"call_timeout_s=1 "),
        ("no json", "form"),
        ("[]", "form"),
        ('{"data": {}}', "form"),
        ({"type": "state", "data": {}}, "form"),
        ({"type": "observation", "data": {"reward": 1.0}}, "form"),
        ({"type": "observation", "data": STEP | {"observation": "x"}}, "form"),
        ({"type": "observation", "data": STEP | {"done": "yes"}}, "form"),
        *(
            ({"type": "observation", "data": STEP | {"reward": reward}}, "form")
            for reward in ("1.0", [1.0], {"value": 1.0}, 1e31, -(10**40))
        ),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "form"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "division by zero"}}, "division by zero"),
        ({"type": "error"}, "None"),
        ("x" * (4 * 2**20 + 1), "more than 4194304 bytes"),
        ({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "no room"}}, "no room"),
    ],
)
@asynchronous
async def test_a_server_that_misbehaves_fails_the_episode_and_is_no_zero(said: Any, reason: str) -> None:
    def says(asked: dict[str, Any], answer: dict[str, Any]) -> Any:
        return said if asked["type"] == "step" else answer

    limit_s = 1.0 if said is None else 10.0
    async with started(OpenEnvServer(says=says), call_timeout_s=limit_s) as pool, pool.session() as session:
        await session.reset({}, 4)
        with pytest.raises(EnvironmentFailedError, match=reason):
            await session.reply("4")


@asynchronous
async def test_a_refusal_whose_errors_are_no_list_is_shown_to_the_policy() -> None:
    refusal = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "digits", "errors": 5}}

    def says(asked: dict[str, Any], answer: dict[str, Any]) -> Any:
        return refusal if asked["type"] == "step" else answer

    async with started(OpenEnvServer(says=says)) as pool, pool.session() as session:
        await session.reset({}, 4)
        assert await session.reply("4") == user("{'error': 'digits'}")


@asynchronous
async def test_a_column_that_no_json_can_have_fails_the_episode() -> None:
    async with started(OpenEnvServer(), {"arguments": ["level"]}) as pool, pool.session() as session:
        with pytest.raises(EnvironmentFailedError, match="reset"):
            await session.reset({"level": b"hard"}, 17)


def test_an_observation_that_is_nested_too_deeply_fails_the_episode() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(EnvironmentFailedError):
        _content(deep)


class Silent:
    """A socket whose server says nothing."""

    is_closed = False

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


@asynchronous
async def test_a_cancellation_while_a_session_ends_is_not_lost() -> None:
    socket: Any = Silent()
    options = OpenEnvOptions.model_validate({"url": "http://a"})

    async def episode() -> None:
        async with OpenEnvSession(socket, "http://a", "environment", options, 1.0, True, "guess"):
            pass
        await asyncio.Event().wait()

    playing = asyncio.create_task(episode())
    await asyncio.sleep(0)  # it waits for the end of the session
    playing.cancel()
    await settle()
    assert (playing.cancelled(), socket.is_closed) == (True, True)


@asynchronous
async def test_an_answer_that_was_not_asked_for_ends_the_episode() -> None:
    async with started(OpenEnvServer()) as pool, pool.session() as session:
        await session.reset({}, 4)
        await session.socket.send_json({"type": "state"})
        await until(lambda: not session._frames.empty())
        with pytest.raises(EnvironmentFailedError, match="form"):
            await session.reply("4")


@asynchronous
async def test_a_server_that_talks_on_its_own_is_not_read() -> None:
    """One message waits and the reader has another; the rest stays in sockets."""

    class Talkative(Silent):
        num_read = 0

        async def receive(self) -> Any:
            self.num_read += 1
            return aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, '{"type": "state"}', None)

    socket: Any = Talkative()
    options = OpenEnvOptions.model_validate({"url": "http://a"})
    async with OpenEnvSession(socket, "http://a", "environment", options, 1.0, True, "guess") as session:
        await settle()
        assert socket.num_read == 2
        with pytest.raises(EnvironmentFailedError, match="form"):
            await session.reply("4")


def schema(**action: Any) -> dict[str, Any]:
    return GUESS | {"action": GUESS["action"] | action}


@pytest.mark.parametrize(
    ("server", "changes", "key"),
    [
        (schema(required=[]), {}, "options.action"),
        (schema(required=["a", "b"]), {}, "options.action"),
        (GUESS, {"options": {"action": "text"}}, "options.action"),
        (GUESS, {"options": {"observation": "text"}}, "options.observation"),
        (TOOLS, {}, "tool_parser"),
        ({"schema": {}}, {}, "options.url"),
    ],
)
@asynchronous
async def test_what_does_not_fit_ends_the_start(server: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.{key}"):
        async with started(OpenEnvServer(server), **changes):
            pass


@asynchronous
async def test_tools_of_one_name_end_the_start() -> None:
    def says(asked: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if asked.get("data", {}).get("type") == "list_tools":
            answer["data"]["observation"]["tools"] = [ADD, ADD]
        return answer

    with pytest.raises(ConfigError, match="2 tools 'add'"):
        async with started(OpenEnvServer(TOOLS, says=says), tool_parser="hermes"):
            pass


@asynchronous
async def test_a_server_that_refuses_to_list_tools_ends_the_start_with_the_reason() -> None:
    def says(asked: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        is_listing = asked.get("data", {}).get("type") == "list_tools"
        return {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no"}} if is_listing else answer

    with pytest.raises(ConfigError, match=r"options\.url"):
        async with started(OpenEnvServer(TOOLS, says=says), tool_parser="hermes"):
            pass


@asynchronous
async def test_servers_that_are_down_or_differ_end_the_start(tmp_path: Any) -> None:
    async with running(OpenEnvServer()) as one, running(OpenEnvServer(TOOLS)) as other:
        for urls, said in (
            ([one, CLOSED], "start the server"),
            ([one, other], "other actions"),
            ([f"{one}/x"], "no server of"),
        ):
            pool = pool_of(urls)
            with pytest.raises(ConfigError, match=said):
                await pool.start()
            await pool.close()


@asynchronous
async def test_a_session_is_not_led_to_another_server() -> None:
    other, app = OpenEnvServer(), web.Application()
    async with running(other) as url:

        async def leads_away(_: web.Request) -> web.Response:
            raise web.HTTPFound(f"{url}/ws")

        app.add_routes([web.get("/schema", other.describe), web.get("/ws", leads_away)])
        async with TestServer(app) as server:
            pool = pool_of(str(server.make_url("")))
            await pool.start()
            with pytest.raises(EnvironmentFailedError, match="302"):
                async with pool._at(pool._servers[0]):
                    pass
            await pool.close()
    assert other.most_sessions == 0


@asynchronous
async def test_the_key_goes_to_the_server(tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    server = OpenEnvServer()
    async with started(server, {"key_file": str(key)}):
        assert server.headers["Authorization"] == "Bearer secret"


def test_a_lost_session_costs_its_episode_alone() -> None:
    """The episode keeps its tokens and has no reward; its siblings are scored."""

    def says(asked: dict[str, Any], answer: dict[str, Any]) -> Any:
        return b"" if asked.get("data") == {"guess": "9"} else answer

    async def body(setup: Setup) -> Rollouts:
        async with started(OpenEnvServer(says=says)) as pool:
            setup.source.pool = pool
            return await setup.source.generate(setup.lease, Progress(setup.lease))

    setup = Setup(["3", "1"], ["2", "9"], max_turns=2)
    setup.lease = msgspec.structs.replace(setup.lease, prompt_id=31)
    rollouts = asyncio.run(body(setup))
    won, lost = rollouts.episodes
    assert [each["content"] for each in won.messages] == ["3", "wrong", "1"]
    assert sampled_text(won) == ["3<|end|>1<|end|>"]
    assert (sampled_text(lost), "lost" in lost.failure) == (["2<|end|>9<|end|>"], True)
    np.testing.assert_array_equal(rollouts.own_rewards, [[0.75], [np.nan]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"url": []},
        {"url": "http://me:pass@host"},
        {"url": ["http://a", "http://a/"]},
        {"url": "http://a", "reward": "mean"},
        {"url": "http://a", "word": 1},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="options"):
        EnvironmentSection.model_validate({"factory": "openenv", "options": options})
    with pytest.raises(ValueError, match="factory"):
        EnvironmentSection.model_validate({"agent": "openenv", "options": {"url": "http://a"}})


def test_the_plugin_is_found_by_its_name_and_its_reward_counts() -> None:
    section = EnvironmentSection.model_validate({"factory": "openenv", "options": {"url": "http://a"}})
    pool = environments_of(section, rewards_turns=True)
    assert isinstance(pool, OpenEnvPool)
    assert (pool.rewards_turns, section.own_weight) == (True, 1.0)
