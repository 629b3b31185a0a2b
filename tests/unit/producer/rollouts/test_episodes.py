"""Policy and environment take turns: whose tokens are whose, which limit ends what, and what a failure costs."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.utils import chat_template_utils

from producer.engine_contract import Completion, ToolCall
from producer.environments.contract import EnvironmentFailedError
from producer.groups import Episode, LeaseFailure, Rollouts
from producer.metrics import Counters
from producer.rollouts.chat import ChatFormat
from producer.rollouts.engine_access import Progress
from producer.rollouts.several_turns import PlayedRollouts
from protocol.config.rewards import EnvironmentSection
from protocol.errors import EngineError
from tests.scripted_trainer import lease
from tests.unit.producer.rollouts.test_chat import PLAIN, TOOLS, tokenizer

TOKENIZER = tokenizer(PLAIN)
END = 128
ASKED = [{"role": "user", "content": "2+3"}]


class Environment:
    """Adds; the argument -1 hangs it, and what it was asked is kept."""

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.sum = 0
        self.done = False

    async def reset(self, columns: dict[str, Any], prompt_id: int) -> str | None:
        self.pool.resets.append(columns)
        if len(self.pool.resets) <= self.pool.failing_resets:
            raise EnvironmentFailedError("reset raised")
        self.done = self.pool.done_at_reset
        return " go"

    async def call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        if tool != "add":
            return f"no {tool}", True
        if arguments["a"] == -1:
            raise EnvironmentFailedError("tool add did not return")
        if arguments["a"] == -2:
            await asyncio.sleep(60)
        self.sum += arguments["a"]
        self.done = self.sum >= 100
        return str(self.sum), False

    async def reply(self, text: str) -> list[dict[str, Any]]:
        """Add the number. 0 ends the episode, 99 with a message."""
        self.sum += int(text)
        self.done = text == "99"
        return self.pool.said if int(text) else []

    async def turn_reward(self) -> float | None:
        if self.sum == 11:
            raise EnvironmentFailedError("get_turn_reward returned nan")
        return float(self.sum) if self.sum else None

    async def reward(self) -> float | None:
        if self.sum == 13:
            raise EnvironmentFailedError("get_reward raised")
        return float(self.sum)


class Pool:
    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []
        self.failing_resets = self.failing_starts = 0
        self.rewards_turns = self.replies = self.done_at_reset = False
        self.said = [{"role": "user", "content": "more"}]

    @asynccontextmanager
    async def session(self):
        self.failing_starts -= 1
        if self.failing_starts >= 0:
            raise EnvironmentFailedError("it cannot be started: Resource temporarily unavailable")
        yield Environment(self)


class Sampler:
    """Samples what the script of an episode says next, told apart by the first turn."""

    def __init__(self, scripts: list[list[str]]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.started = 0
        self.asked: list[tuple[str, int]] = []
        self.of: dict[tuple[int, ...], list[str]] = {}

    async def __call__(self, prompt_ids: list[int], sampling: Any) -> list[Completion]:
        assert sampling.num_generations == 1
        self.asked.append((TOKENIZER.decode(prompt_ids), sampling.max_completion_length))
        known = [script for ids, script in self.of.items() if tuple(prompt_ids[: len(ids)]) == ids]
        script = known[0] if known else self.scripts[self.started]
        self.started += not known
        ids = [*TOKENIZER(script.pop(0))["input_ids"], END]
        cut = ids[: sampling.max_completion_length]
        self.of[(*prompt_ids, *cut)] = script
        return [Completion(cut, [-0.5] * len(cut), len(cut) < len(ids), [len(self.asked)] * len(cut))]


class Parser:
    """A turn that is JSON is a call of it."""

    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        text = TOKENIZER.decode(token_ids)
        if not text.startswith("{"):
            return text, []
        return "", [ToolCall(name, arguments) for name, arguments in json.loads(text).items()]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.rollouts.several_turns._RESET_PAUSE_S", 0.0)


class Setup:
    def __init__(self, *scripts: list[str], room: int = 100, **changes: Any) -> None:
        values = {"factory": "shop:Shop", "tool_parser": "hermes", "reward_weight": 1.0}
        section = EnvironmentSection.model_validate(values | changes)
        self.pool, self.sampler, self.counters = Pool(), Sampler(list(scripts)), Counters()
        chat = ChatFormat(TOKENIZER, 200, {}, TOOLS, Parser())
        self.source = PlayedRollouts(self, section, self.pool, chat, self.counters, ("environment",))  # type: ignore[arg-type]
        self.lease = lease(1)
        sampling = msgspec.structs.replace(
            self.lease.sampling, num_generations=len(scripts), max_completion_length=room
        )
        self.lease = msgspec.structs.replace(self.lease, prompt=ASKED, columns={"answer": "5"}, sampling=sampling)

    @asynccontextmanager
    async def enter(self, lease: Any, progress: Any):
        """In the place of `EngineAccess`."""
        yield self.sampler

    def generate(self) -> Rollouts:
        return asyncio.run(self.source.generate(self.lease, Progress(self.lease)))

    def play(self) -> list[Episode]:
        return self.generate().episodes


def sampled_text(episode: Episode) -> list[str]:
    return [
        TOKENIZER.decode([token for token, sampled in zip(r.token_ids, r.is_sampled, strict=True) if sampled])
        for r in episode.records
    ]


def test_two_turns_and_one() -> None:
    setup = Setup(['{"add": {"a": 5}}', "5"], ["7"])
    first, second = setup.play()
    prompt = "add[user]2+3 go<|end|>\n[assistant]"
    assert [TOKENIZER.decode(record.token_ids) for record in first.records] == [
        prompt + '{"add": {"a": 5}}<|end|>\n[tool]5<|end|>\n[assistant]5<|end|>'
    ]
    assert sampled_text(first) == ['{"add": {"a": 5}}<|end|>5<|end|>']
    assert first.prompt_length == second.prompt_length == len(prompt.replace("<|end|>", "E"))
    assert first.messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "000000000", "type": "function", "function": {"name": "add", "arguments": {"a": 5}}}],
        },
        {"role": "tool", "name": "add", "content": "5", "tool_call_id": "000000000"},
        {"role": "assistant", "content": "5"},
    ]
    assert second.messages == [{"role": "assistant", "content": "7"}]
    assert (first.reward, second.reward, first.failure, first.truncated) == (5.0, 0.0, "", False)
    assert setup.pool.resets == [{"answer": "5", "prompt": ASKED}] * 2
    assert ASKED == [{"role": "user", "content": "2+3"}], "what reset adds is added to a copy"
    assert (setup.counters.turns, setup.counters.tool_calls, setup.counters.failed_tool_calls) == (3, 1, 0)


def test_an_episode_that_is_over_before_it_begins_is_said(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(['{"add": {"a": 5}}', "5"], ["7"])
    setup.pool.done_at_reset = True
    first, _ = setup.play()
    assert (first.reward, setup.counters.tool_calls) == (0.0, 0)
    assert "environment: `done` is true right after `reset`" in caplog.text


def test_calls_that_cannot_be_answered_are_answered_with_an_error() -> None:
    setup = Setup(['{"sell": {}, "add": null}', "oh"], ["7"], room=150)
    episode, _ = setup.play()
    first, sold, added, last = (message["content"] for message in episode.messages)
    assert (first, sold, last) == ("", "no sell", "oh")
    assert "no JSON object" in added
    assert (setup.counters.tool_calls, setup.counters.failed_tool_calls) == (2, 2)


def test_tools_that_the_last_turn_asks_for_are_not_run() -> None:
    episode, _ = Setup(['{"add": {"a": 1}}', '{"add": {"a": 2}}', "never"], ["7"], max_turns=2).play()
    assert episode.messages[-1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert (episode.reward, episode.truncated) == (1.0, False)


def test_the_limits_of_turn_and_episode_are_those_of_tokens_and_end_it_truncated() -> None:
    call = '{"add": {"a": 5}}'  # 17 tokens and an end; the result and what begins the next turn are 21 more
    by_turn, _ = Setup([call, "5"], ["7"], max_turn_tokens=10).play()
    assert (by_turn.truncated, by_turn.messages) == (True, [{"role": "assistant", "content": call[:10]}])
    setup = Setup([call, "5555555"], ["7"], room=42)
    within, _ = setup.play()
    assert sorted(room for _, room in setup.sampler.asked) == [3, 42, 42]
    assert (within.truncated, within.messages[-1]["content"], len(within.token_ids)) == (True, "555", 42)
    for room in (39, 18):
        no_room, _ = Setup([call, "5"], ["7"], room=room).play()
        assert (no_room.truncated, len(no_room.messages), len(no_room.token_ids)) == (True, 1, 18)
        assert no_room.reward == 5.0


@pytest.mark.parametrize(("argument", "timeout_s"), [(-1, 60.0), (-2, 0.5)], ids=["failed", "took too long"])
def test_a_failed_episode_keeps_what_was_sampled_and_is_not_scored(argument: int, timeout_s: float) -> None:
    setup = Setup([f'{{"add": {{"a": {argument}}}}}', "never"], ["7"], episode_timeout_s=timeout_s)
    failed, scored = setup.play()
    assert sampled_text(failed) == [f'{{"add": {{"a": {argument}}}}}<|end|>']
    assert failed.records[0].is_sampled[-1]
    assert failed.failure
    assert not scored.failure


def test_a_reward_that_failed_is_missing_alone() -> None:
    rollouts = Setup(['{"add": {"a": 13}}', "13"], ["7"]).generate()
    np.testing.assert_array_equal(rollouts.own_rewards, [[math.nan], [0.0]])


def turn_rewards(*scripts: list[str], **changes: Any) -> list[Episode]:
    setup = Setup(*scripts, **changes)
    setup.pool.rewards_turns = True
    return setup.play()


def test_the_reward_of_a_turn_lies_on_its_last_token() -> None:
    call = '{"add": {"a": 5}}'  # a turn of 18 tokens, behind which 21 are shown
    first, second = turn_rewards([call, call, "10"], ["7"], reward_weight=0.5)
    [record] = first.records
    ends = np.flatnonzero(~np.isnan(record.credit))
    assert (ends - first.prompt_length).tolist() == [17, 56, 81]
    assert record.is_sampled[ends].all()
    assert record.credit[ends].tolist() == [2.5, 5.0, 5.0], "half of the sums 5, 10 and 10"
    assert np.isnan(second.records[0].credit).all(), "None is no reward"
    for changes in ({"reward_weight": 0.0}, {"max_turns": 1}):
        unrewarded, _ = turn_rewards([call, "never"], ["7"], **changes)
        assert np.isnan(unrewarded.records[0].credit).all()


def test_a_reward_of_a_turn_that_fails_fails_the_episode_which_keeps_its_tokens() -> None:
    failed, other = turn_rewards(['{"add": {"a": 11}}', "never"], ["7"])
    assert "get_turn_reward returned nan" in failed.failure
    assert sampled_text(failed) == ['{"add": {"a": 11}}<|end|>']
    assert not other.failure


def talk(*scripts: list[str], said: list[dict[str, Any]] | None = None, **changes: Any) -> list[Episode]:
    """Play with an environment that replies."""
    setup = Setup(*scripts, **changes)
    setup.pool.replies = setup.pool.rewards_turns = True
    setup.pool.said = said or setup.pool.said
    return setup.play()


def test_an_environment_that_replies_goes_on_with_messages_that_are_not_trained() -> None:
    first, second = talk(["1", "20", "0"], ["99"], reward_weight=0.5)
    [record] = first.records
    shown = "<|end|>\n[user]more<|end|>\n[assistant]"
    prompt = "add[user]2+3 go<|end|>\n[assistant]"
    assert TOKENIZER.decode(record.token_ids) == f"{prompt}1{shown}20{shown}0<|end|>"
    assert sampled_text(first) == ["1<|end|>20<|end|>0<|end|>"]
    assert [(each["role"], each["content"]) for each in first.messages] == [
        ("assistant", "1"), ("user", "more"), ("assistant", "20"), ("user", "more"), ("assistant", "0"),
    ]  # fmt: skip
    ends = np.flatnonzero(~np.isnan(record.credit))
    assert record.credit[ends].tolist() == [0.5, 10.5, 10.5], "half of the sums 1, 21 and 21"
    assert [TOKENIZER.decode(record.token_ids[end - 1]) for end in ends] == ["1", "0", "0"]
    assert (first.reward, first.truncated) == (21.0, False)
    assert ([each["content"] for each in second.messages], second.reward) == (["99"], 99.0)
    assert sampled_text(second) == ["99<|end|>"]


def test_a_reply_may_be_messages_of_several_roles() -> None:
    said = [
        {"role": "system", "content": "slow"},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "ok"},
    ]
    first, _ = talk(["1", "0"], ["0"], said=said)
    assert sampled_text(first) == ["1<|end|>0<|end|>"]
    assert TOKENIZER.decode(first.token_ids) == (
        "1<|end|>\n[system]slow<|end|>\n[assistant]8<|end|>\n[user]ok<|end|>\n[assistant]0<|end|>"
    )


def test_the_last_turn_is_heard_and_a_cut_one_is_not() -> None:
    first, second = talk(["1", "2", "never"], ["333"], max_turns=2, max_turn_tokens=3)
    assert (first.reward, len(first.messages), first.truncated) == (3.0, 3, False)
    assert (second.reward, second.truncated) == (0.0, True)


def test_a_call_that_ends_the_episode_is_the_last_one() -> None:
    setup = Setup(['{"add": {"a": 100}, "sell": {}}', "never"], ["7"])
    first, _ = setup.play()
    assert (first.reward, len(first.messages), first.truncated) == (100.0, 1, False)
    assert setup.counters.tool_calls == 1


def test_calls_and_replies_take_turns() -> None:
    first, _ = talk(['{"add": {"a": 5}}', "1", "0"], ["0"])
    assert [each["role"] for each in first.messages] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert first.reward == 6.0


def test_a_reply_that_fails_fails_the_episode_which_keeps_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Environment, text: str) -> list[dict[str, Any]]:
        if text == "5":
            raise EnvironmentFailedError("reply raised")
        return []

    monkeypatch.setattr(Environment, "reply", fails)
    failed, scored = talk(["5"], ["7"])
    assert (failed.failure, scored.failure) == ("reply raised", "")
    assert sampled_text(failed) == ["5<|end|>"]


def test_an_answer_of_any_length_ends_the_episode_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def says_much(self: Environment, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        return "1" * 10**6, False

    monkeypatch.setattr(Environment, "call", says_much)
    setup, read = Setup(['{"add": {"a": 5}}', "never"], ["7"]), list[int]()
    token_ids = type(TOKENIZER).__call__

    def counted(self: Any, text: str, **options: Any) -> Any:
        read.append(len(text))
        return token_ids(self, text, **options)

    monkeypatch.setattr(type(TOKENIZER), "__call__", counted)
    episode, _ = setup.play()
    assert (episode.truncated, len(episode.messages), episode.failure) == (True, 1, "")
    assert max(read) == 16 * 200


def test_what_is_said_in_an_episode_and_the_template_refuses_costs_that_episode_alone() -> None:
    refusing = PLAIN + "{% if messages[-1].content == '5' %}{{ raise_exception('no fives') }}{% endif %}"
    setup = Setup(['{"add": {"a": 5}}', "never"], ["7"])
    setup.source.chat = ChatFormat(tokenizer(refusing), 200, {}, TOOLS, Parser())
    failed, scored = setup.play()
    assert ("no fives" in failed.failure, scored.failure, scored.reward) == (True, "", 0.0)
    assert sampled_text(failed) == ['{"add": {"a": 5}}<|end|>']


def test_a_prompt_may_be_nested_deeply() -> None:
    deep: list[Any] = []
    for _ in range(600):
        deep = [deep]
    setup = Setup(["5"], ["7"])
    setup.lease = msgspec.structs.replace(setup.lease, prompt=[ASKED[0] | {"note": deep}])
    if hasattr(
        chat_template_utils, "_plain_template_data"
    ):  # transformers 5.23 copies what a template sees, by recursion
        with pytest.raises(LeaseFailure, match="the chat template refused the messages: RecursionError"):
            setup.play()
    else:
        assert [sampled_text(episode) for episode in setup.play()] == [["5<|end|>"], ["7<|end|>"]]


def test_a_reset_is_tried_again_and_then_fails_the_group() -> None:
    setup = Setup(["5"], ["7"])
    setup.pool.failing_resets = 2
    assert len(setup.play()) == 2
    assert setup.counters.failed_episodes == 2
    setup = Setup(["5"], ["7"])
    setup.pool.failing_resets = 10
    with pytest.raises(LeaseFailure, match="reset raised") as caught:
        setup.play()
    assert caught.value.reason == "environment_failed"


def test_an_outage_fails_the_group_and_is_no_fault_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Environment, columns: dict[str, Any], prompt_id: int) -> None:
        raise EnvironmentFailedError("it is down", is_outage=True)

    monkeypatch.setattr(Environment, "reset", fails)
    with pytest.raises(LeaseFailure, match="it is down") as caught:
        Setup(["5"], ["7"]).play()
    assert caught.value.reason == "generation_failed"


def test_an_environment_that_cannot_be_started_is_tried_again_and_then_fails_the_group() -> None:
    setup = Setup(["5"], ["7"])
    setup.pool.failing_starts = 2
    assert len(setup.play()) == 2
    setup = Setup(["5"], ["7"])
    setup.pool.failing_starts = 10
    with pytest.raises(LeaseFailure, match="cannot be started") as caught:
        setup.play()
    assert caught.value.reason == "environment_failed"


def test_what_is_no_failure_of_the_lease_is_not_hidden_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(["5"], ["7"])

    async def dies(self: Environment, columns: dict[str, Any], _: int) -> None:
        self.pool.resets.append(columns)
        if len(self.pool.resets) == 1:
            raise EnvironmentFailedError("the first episode's, which ends its sibling")
        try:
            await asyncio.Event().wait()
        finally:
            raise EngineError("the engine died")

    monkeypatch.setattr(Environment, "reset", dies)
    monkeypatch.setattr("producer.rollouts.several_turns._RESETS", 1)
    with pytest.raises(EngineError):
        setup.play()


def test_a_timeout_from_below_is_not_the_episode_s() -> None:
    setup = Setup(["5"], ["7"])

    async def sample(*_: object) -> None:
        raise TimeoutError("the engine's")

    setup.sampler = sample  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="the engine's"):
        setup.play()


def test_an_observation_needs_a_message_to_stand_in() -> None:
    setup = Setup(["5"], ["7"])
    setup.lease = msgspec.structs.replace(setup.lease, prompt=[{"role": "user", "content": None}])
    with pytest.raises(LeaseFailure) as caught:
        setup.play()
    assert caught.value.reason == "bad_prompt"


def test_a_prompt_that_cannot_be_used_fails_its_lease() -> None:
    setup = Setup(["5"], ["7"], room=190)
    with pytest.raises(LeaseFailure, match=r"has 28 tokens, but engine\.max_model_len=200 less .*=190 leaves 10"):
        setup.play()
    setup.lease = msgspec.structs.replace(setup.lease, prompt="2+3")
    with pytest.raises(LeaseFailure, match=r"an environment needs a list of messages .* got str: 2"):
        setup.play()
