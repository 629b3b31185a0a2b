"""The user's environments, as real processes: what they say, what they fail at, and what is left of them."""

import asyncio
from pathlib import Path

import psutil
import pytest

from producer.environments.contract import EnvironmentFailedError
from producer.environments.pool import EnvironmentPool
from producer.environments.worker import Answer, Call, Environment
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from tests.unit.producer.fake_children import FakeChildren
from tests.unit.producer.loop import asynchronous, until

SHOP = "tests.unit.producer.toys:Shop"


def section(**changes: object) -> EnvironmentSection:
    return EnvironmentSection.model_validate({"factory": SHOP, "reward_weight": 1.0, "tool_parser": "hermes"} | changes)


def columns(stock: int = 4) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": "shop"}], "stock": stock}


def oom_score_below(keeper: int) -> int:
    [kept] = psutil.Process(keeper).children()
    return int(Path(f"/proc/{kept.pid}/oom_score_adj").read_text())


@pytest.mark.long
@asynchronous
async def test_an_episode_costs_nothing_but_itself() -> None:
    """One process serves many; one that hangs or dies is replaced."""
    environments = EnvironmentPool(section(max_concurrent=1, call_timeout_s=1.5))
    try:
        async with environments.session() as environment:
            first = environment.process.process.pid
            assert await environment.reset(columns()) == " stock 4"
            assert oom_score_below(first) == 1000, "it goes before the engine"
            assert await environment.call("buy", {"count": 3}) == ("sold 3", False)
            assert await environment.call("buy", {"count": 9}) == ("{'error': 'only 4 left'}", True)
            assert await environment.call("wait", {"seconds": 0.01}) == ("waited", False)
            content, failed = await environment.call("buy", {"how": "many"})
            assert failed
            assert "unexpected keyword argument 'how'" in content
            for name in ("_hidden", "reset", "get_reward", "__init__", "sell"):
                assert await environment.call(name, {}) == (f"{{'error': 'Tool {name} not found.'}}", True)
            assert await environment.reward() == 0.75
        async with environments.session() as environment:
            assert environment.process.process.pid == first
            with pytest.raises(EnvironmentFailedError, match=r"reset raised\n(.|\n)*ValueError: no such stock"):
                await environment.reset(columns(stock=-1))
            assert await environment.reset(columns(stock=0)) == " stock 0"
            assert await environment.reward() is None
            with pytest.raises(EnvironmentFailedError, match=r"tool hang did not return .*call_timeout_s=1.5 seconds"):
                await environment.call("hang", {})
            with pytest.raises(EnvironmentFailedError, match="has ended"):
                await environment.reward()
        await until(lambda: not psutil.pid_exists(first))
        async with environments.session() as environment:
            await environment.reset(columns())
            with pytest.raises(EnvironmentFailedError, match=r"tool die: its process ended \(exit status 3\)"):
                await environment.call("die", {})
        async with environments.session() as environment:
            assert await environment.reset(columns(stock=1)) == " stock 1"
            with pytest.raises(EnvironmentFailedError, match="cannot be sent"):
                await environment.call("buy", {"count": 2**70})
            last = environment.process.process.pid
    finally:
        await environments.close()
    assert not psutil.pid_exists(last)


@asynchronous
async def test_as_many_at_once_as_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    children, environments = FakeChildren(monkeypatch, lambda _: Answer()), EnvironmentPool(section(max_concurrent=2))

    async def episode() -> None:
        async with environments.session() as environment:
            await environment.reset({})
            assert environment.start_timeout_s == 0.0

    await asyncio.gather(*(episode() for _ in range(4)))
    assert len(children.started) == 2
    await environments.close()


def test_tools_are_described_as_transformers_describes_functions() -> None:
    tools, *methods = Environment(SHOP, {}).answer(Call("describe")).value
    assert methods == [True, False, False]
    assert [tool["function"]["name"] for tool in tools] == ["buy", "die", "hang", "wait"]
    assert tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"count": {"type": "integer", "description": "How many."}},
        "required": ["count"],
    }
    assert Environment("tests.unit.producer.toys:Silent", {}).answer(Call("describe")).value == [
        [],
        False,
        False,
        False,
    ]


def test_a_method_that_rewards_turns_is_no_tool() -> None:
    environment = Environment("tests.unit.producer.toys:Encouraging", {})
    assert environment.answer(Call("describe")).value == [[], False, True, False]
    assert environment.answer(Call("turn_reward")) == Answer(0.5)
    assert environment.answer(Call("turn_reward")) == Answer(None)
    assert "get_turn_reward returned nan" in environment.answer(Call("turn_reward")).problem
    assert environment.answer(Call("tool", "get_turn_reward")).raised


class Ends:
    """Is done when its tool says so, and knows nothing of the episode before."""

    def reset(self, **columns: object) -> None:
        pass

    def end(self) -> None:
        """Ends it."""
        self.done = True


class EndsByClass(Ends):
    done = False


class OnlyReads:
    reset, ended = Ends.reset, False

    @property
    def done(self) -> bool:
        return self.ended

    def end(self) -> None:
        """Ends it."""
        self.ended = True


class IsTool:
    reset = Ends.reset

    def done(self) -> str:
        """Is a tool of this name."""
        return "yes"


@pytest.mark.parametrize(
    ("kind", "ends", "ends_again"),
    [(Ends, True, False), (EndsByClass, True, False), (OnlyReads, True, True), (IsTool, False, False)],
)
def test_an_episode_begins_without_the_end_of_the_one_before(kind: type, ends: bool, ends_again: bool) -> None:
    environment = Environment(f"{__name__}:{kind.__name__}", {})
    for is_first in (True, False):
        assert environment.answer(Call("reset")).done is (False if is_first else ends_again)
        if kind is not IsTool:
            assert environment.answer(Call("tool", "end")).done is ends
    if kind is IsTool:
        assert environment.answer(Call("tool", "done")) == Answer("yes")


@pytest.mark.parametrize("value", ["0.5", [0.5], {"reward": 0.5}, b"1", float("inf"), -1e39])
def test_what_is_no_number_is_no_reward(value: object) -> None:
    environment = Environment("tests.unit.producer.toys:Encouraging", {})
    environment._instance.rewards = iter([value])
    assert "get_turn_reward returned" in environment.answer(Call("turn_reward")).problem


@asynchronous
async def test_an_outage_is_told_apart_also_in_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Environment("tests.unit.producer.toys:Remote", {})
    FakeChildren(monkeypatch, toy.answer)
    async with EnvironmentPool(section(reward_weight=None)).session() as environment:
        await environment.reset({})
        assert await environment.call("ask", {"what": "broken"}) == ("{'error': 'broken'}", True)
        with pytest.raises(EnvironmentFailedError, match="tool ask failed: it is down") as caught:
            await environment.call("ask", {"what": "down"})
        assert caught.value.is_outage
        await environment.reset({})


def test_a_reply_is_no_tool_and_the_environment_ends_the_episode() -> None:
    environment = Environment("tests.unit.producer.toys:Teller", {})

    def reply(text: str) -> Answer:
        return environment.answer(Call("reply", arguments={"text": text}))

    tools, *methods = environment.answer(Call("describe")).value
    assert ([tool["function"]["name"] for tool in tools], methods) == (["give_up"], [False, False, True])
    assert environment.answer(Call("tool", "reply", {"text": "3"})).raised
    for _ in range(2):  # the next episode begins anew
        assert environment.answer(Call("reset", arguments={"secret": 5})) == Answer()
        assert reply("3") == Answer([{"role": "user", "content": "higher"}])
        assert reply("0").value == [{"role": "system", "content": "not 0"}, {"role": "user", "content": "higher"}]
        assert reply("pass") == Answer([])
        assert reply("5") == Answer([{"role": "user", "content": "lower"}], done=True)
    environment.answer(Call("reset", arguments={"secret": 5}))
    assert environment.answer(Call("tool", "give_up")) == Answer("5", done=True)
    for text in ("odd", "many"):
        assert environment.answer(Call("reset", arguments={"secret": 5})) == Answer()
        assert reply(text).problem
    for wrong in (
        [{"role": "user"}],
        [{"content": "x"}],
        ["x"],
        {"role": "user", "content": "x"},
        [{"role": "user", "content": 5}],
    ):
        environment._instance.reply = lambda text, wrong=wrong: wrong
        assert "reply returned no messages" in reply("3").problem


@asynchronous
async def test_a_session_knows_that_its_episode_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Environment("tests.unit.producer.toys:Teller", {})
    FakeChildren(monkeypatch, toy.answer)
    environments = EnvironmentPool(section(reward_weight=None))
    for _ in range(2):
        async with environments.session() as environment:
            await environment.reset({"secret": 2})
            assert (await environment.reply("1"), environment.done) == ([{"role": "user", "content": "higher"}], False)
            assert (await environment.reply("2"), environment.done) == ([{"role": "user", "content": "lower"}], True)
    await environments.close()


def test_only_text_lists_and_finite_numbers_come_out() -> None:
    environment = Environment(SHOP, {})
    environment._instance.reset = lambda **_: 7
    assert "reset returned a int" in environment.answer(Call("reset")).problem
    environment._instance.get_reward = lambda: float("nan")
    assert "get_reward returned nan" in environment.answer(Call("reward")).problem
    environment._tools["buy"] = lambda: [{"type": "text", "text": "x"}]
    assert environment.answer(Call("tool", "buy")) == Answer([{"type": "text", "text": "x"}])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factory": "tests.unit.producer.toys:Missing"}, "has no `Missing`"),
        ({"factory": "tests.unit.producer.toys:NoReset"}, "makes a NoReset without `reset`"),
        ({"factory": "tests.unit.producer.toys:broken"}, "RuntimeError: cannot connect"),
        ({"reward_weight": None}, "has get_reward; set its weight"),
        ({"factory": "tests.unit.producer.toys:Silent"}, "has no get_reward; add it"),
        ({"tool_parser": None}, "has tools; name vLLM's parser"),
    ],
)
@asynchronous
async def test_what_does_not_fit_is_said_at_the_start(
    changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, without the seconds that transformers takes to describe tools."""
    monkeypatch.setattr("transformers.utils.get_json_schema", lambda tool: {"function": {"name": tool.__name__}})

    def answer(call: Call) -> Answer:
        try:
            return Environment(str(section(**changes).factory), {}).answer(call)
        except Exception as error:
            return Answer(problem=f"{type(error).__name__}: {error}")

    FakeChildren(monkeypatch, answer)
    with pytest.raises(ConfigError, match=said):
        await EnvironmentPool(section(**changes)).start()
