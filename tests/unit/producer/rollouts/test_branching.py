"""Completions that branch off a trunk: whose tokens are whose, what the environment went through, and what fails the lease."""

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from producer.engine_contract import Completion
from producer.environments.pool import EnvironmentFailedError
from producer.groups import Episode, LeaseFailure, group_message
from producer.rollouts.branching import trunk_turns
from protocol.config.rewards import EnvironmentSection
from protocol.wire.messages import Group, PolicyInfo
from tests.unit.producer.rollouts import test_episodes
from tests.unit.producer.rollouts.test_chat import PLAIN, tokenizer
from tests.unit.producer.rollouts.test_episodes import END, TOKENIZER, Environment, sampled_text

PROMPT = "add[user]2+3 go<|end|>\n[assistant]"
CALL = '{"add": {"a": 5}}'  # 17 tokens and an end
SHOWN = "\n[tool]5<|end|>\n[assistant]"  # 21 tokens
TRUNK = f"{CALL}<|end|>{SHOWN}"


class Sampler:
    """Says what comes next behind a text: the first text of its list, then the second."""

    def __init__(self, said: dict[str, list[str]]) -> None:
        self.said = {behind: list(texts) for behind, texts in said.items()}
        self.rooms: list[int] = []

    async def __call__(self, prompt_ids: list[int], sampling: Any) -> list[Completion]:
        self.rooms.append(sampling.max_completion_length)
        await asyncio.sleep(0)
        text = self.said[TOKENIZER.decode(prompt_ids).removeprefix(PROMPT)].pop(0)
        ids = [*TOKENIZER(text)["input_ids"], END]
        cut = ids[: sampling.max_completion_length]
        logprobs = [-0.25 * len(cut)] * len(cut)
        return [Completion(cut, logprobs, len(cut) < len(ids), [3] * len(cut))]


class Setup(test_episodes.Setup):
    def __init__(self, said: dict[str, list[str]], num: int, branch: Any = 1, **changes: Any) -> None:
        super().__init__(*[[]] * num, branch_after_turns=branch, **changes)
        self.sampler: Any = Sampler(said)

    def group(self) -> Group:
        played = self.generate()
        room = self.lease.sampling.max_completion_length
        return group_message(self.lease.lease_id, played.episodes, played.own_rewards, room, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.rollouts.several_turns._RESET_PAUSE_S", 0.0)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def test_a_group_is_that_of_its_continuations_with_the_trunk_as_the_prompt() -> None:
    setup = Setup({"": [CALL], TRUNK: ["5", "66", "777"]}, 3)
    group = setup.group()
    assert np.frombuffer(group.prompt_ids, "<i4").tolist() == ids(PROMPT + TRUNK)
    assert np.frombuffer(group.completion_lengths, "<i4").tolist() == [2, 3, 4]
    assert np.frombuffer(group.completion_ids, "<i4").tolist() == [53, END, 54, 54, END, 55, 55, 55, END]
    assert np.frombuffer(group.logprobs, "<f4").tolist() == [-0.5] * 2 + [-0.75] * 3 + [-1.0] * 4
    assert (group.sampled, group.episodes, group.credit, group.policy_version) == (b"", b"", b"", 3)
    assert np.frombuffer(group.rewards, "<f4").tolist() == [5.0] * 3, "the call was played again in each"
    assert setup.pool.resets == [{"answer": "5", "prompt": test_episodes.ASKED}] * 4
    assert setup.sampler.rooms == [100, 61, 61, 61], "what the trunk took is gone"
    counters = setup.counters
    assert (counters.turns, counters.tool_calls, counters.tokens) == (4, 1, 18)
    assert (counters.branched_groups, counters.trunk_tokens, counters.trunk_saved_tokens) == (1, 39, 36)


def test_the_bytes_are_those_of_the_same_prompt_sampled_plainly() -> None:
    group = Setup({"": [CALL], TRUNK: ["5", "66"]}, 2).group()
    completions = asyncio.run(_sampled(Sampler({TRUNK: ["5", "66"]}), ids(PROMPT + TRUNK)))
    episodes = [Episode.of(ids(PROMPT + TRUNK), each) for each in completions]
    rewards = np.full((2, 1), 5.0, np.float32)
    assert group == group_message(group.lease_id, episodes, rewards, 100, 0.0, 0.0)


async def _sampled(sampler: Sampler, prompt_ids: list[int]) -> list[Completion]:
    sampling = msgspec.structs.replace(Setup({}, 2).lease.sampling, max_completion_length=61)
    return [completion for _ in range(2) for completion in await sampler(prompt_ids, sampling)]


def test_reward_functions_see_whole_episodes() -> None:
    setup = Setup({"": [CALL], TRUNK: ["5", "6"]}, 2)
    rollouts = setup.generate()
    said = [[(each["role"], each["content"]) for each in messages] for messages in rollouts.completions]  # type: ignore[index]
    assert said == [[("assistant", ""), ("tool", "5"), ("assistant", last)] for last in "56"]
    assert [TOKENIZER.decode(each.token_ids) for each in rollouts.episodes] == [
        f"{TRUNK}5<|end|>",
        f"{TRUNK}6<|end|>",
    ]
    assert [sampled_text(each) for each in rollouts.episodes] == [["5<|end|>"], ["6<|end|>"]]


def test_a_trunk_that_ends_early_branches_before_its_last_turn() -> None:
    more = '{"add": {"a": 2}}'
    second = f"{more}<|end|>\n[tool]7<|end|>\n[assistant]"
    setup = Setup({"": [CALL], TRUNK: [more], TRUNK + second: ["7", "8", "9"]}, 2, branch=3)
    assert [sampled_text(each) for each in setup.play()] == [["8<|end|>"], ["9<|end|>"]]
    assert setup.counters.tokens == 18 + 18 + 2
    assert setup.counters.trunk_tokens == 39 + 39
    setup = Setup({"": ["5", "6", CALL], TRUNK: ["7"]}, 2, branch=3)
    first, other = setup.play()
    assert (sampled_text(first), sampled_text(other)) == (["6<|end|>"], [f"{CALL}<|end|>7<|end|>"])
    assert (setup.counters.branched_groups, setup.counters.tokens, first.branch_length) == (0, 2, 0)


@pytest.mark.parametrize(("room", "turn_tokens"), [(41, None), (100, 17)], ids=["of the episode", "of the turn"])
def test_a_trunk_without_room_for_another_turn_ends(room: int, turn_tokens: int | None) -> None:
    """The second turn of its trunk is cut, or its first."""
    setup = Setup({"": [CALL, "1", "2"], TRUNK: ["77", "1", "2"]}, 2, 2, room=room, max_turn_tokens=turn_tokens)
    assert [sampled_text(each) for each in setup.play()] == [["1<|end|>"], ["2<|end|>"]]
    assert setup.counters.branched_groups == (turn_tokens is None)


def test_turns_of_the_trunk_count() -> None:
    more = '{"add": {"a": 2}}'
    second = f"{more}<|end|>\n[tool]7<|end|>\n[assistant]"
    setup = Setup({"": [CALL], TRUNK: [more], TRUNK + second: [more, "1"]}, 2, 2, max_turns=3)
    first, _ = setup.play()
    assert [each["tool_calls"][0]["id"] for each in first.messages[::2]] == ["000000000", "000000001", "000000002"]
    assert (len(first.messages), first.reward) == (5, 7.0), "the last call is not run"


def test_a_trunk_that_failed_before_its_first_token_is_played_again() -> None:
    setup = Setup({"": [CALL], TRUNK: ["5", "6"]}, 2)
    sampler = setup.sampler

    async def failing_at_first(*given: Any) -> list[Completion]:
        if len(setup.pool.resets) == 1:
            raise EnvironmentFailedError("it took too long")
        return await sampler(*given)  # type: ignore[no-any-return]

    setup.sampler = failing_at_first
    assert [sampled_text(each) for each in setup.play()] == [["5<|end|>"], ["6<|end|>"]]
    assert (setup.counters.branched_groups, setup.counters.failed_episodes) == (1, 1)


def test_the_trunk_earns_no_credit() -> None:
    setup = Setup({"": [CALL], TRUNK: ["5", "6"]}, 2)
    setup.pool.rewards_turns = True
    first, _ = setup.play()
    [record] = first.records
    assert np.flatnonzero(~np.isnan(record.credit)).tolist() == [len(record.token_ids) - 1]
    first.forget_spans()
    first.reward_spans([(18, 0.5), (39, 0.25), (40, 2.0)])
    assert record.credit[~np.isnan(record.credit)].tolist() == [2.0], "39 tokens after the prompt are the trunk's"
    assert int(np.flatnonzero(~np.isnan(record.credit))[0]) == first.prompt_length + 39


async def _other_reset(self: Environment, columns: dict[str, Any], _: int) -> str:
    self.pool.resets.append(columns)
    return " go" if len(self.pool.resets) == 1 else " on"


async def _other_answer(self: Environment, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    return ("5", False) if len(self.pool.resets) == 1 else ("6", False)


async def _other_end(self: Environment, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    self.done = len(self.pool.resets) > 1
    return "5", False


async def _other_failure(self: Environment, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    return "5", len(self.pool.resets) > 1


async def _other_reward(self: Environment) -> float:
    return float(len(self.pool.resets))


@pytest.mark.parametrize(
    ("method", "other", "named"),
    [
        ("reset", _other_reset, r"reset\(\.\.\.\) gave ' on'.*' go'"),
        ("call", _other_answer, r"call\('add', \{'a': 5\}\) gave \('6', False\).*\('5', False\)"),
        ("call", _other_end, "done=True.*done=False"),
        ("call", _other_failure, r"\('5', True\).*\('5', False\)"),
        ("turn_reward", _other_reward, r"turn_reward\(\) gave [23].0.*1.0"),
    ],
    ids=["reset", "answer", "end", "failure", "reward"],
)
def test_an_environment_that_answers_otherwise_fails_the_lease(
    monkeypatch: pytest.MonkeyPatch, method: str, other: Callable[..., Any], named: str
) -> None:
    monkeypatch.setattr(Environment, method, other)
    setup = Setup({"": [CALL], TRUNK: ["5", "6"]}, 2)
    setup.pool.rewards_turns = True
    with pytest.raises(LeaseFailure, match=rf"environment\.branch_after_turns: .*{named}") as caught:
        setup.play()
    assert caught.value.reason == "environment_failed"


def test_replies_are_played_again() -> None:
    shown = "\n[user]more<|end|>\n[assistant]"
    setup = Setup({"": ["4"], f"4<|end|>{shown}": ["0", "99"]}, 2)
    setup.pool.replies = True
    assert [each.reward for each in setup.play()] == [4.0, 103.0]


def test_a_trunk_that_fails_fails_the_lease() -> None:
    setup = Setup({"": ['{"add": {"a": -1}}']}, 2)
    with pytest.raises(LeaseFailure, match="the trunk of the group failed: tool add did not return") as caught:
        setup.play()
    assert (caught.value.reason, setup.counters.failed_episodes, setup.counters.tokens) == ("environment_failed", 1, 19)
    setup = Setup({"": ['{"add": {"a": -2}}']}, 2, episode_timeout_s=0.5)
    with pytest.raises(LeaseFailure, match=r"the trunk .*environment\.episode_timeout_s=0\.5"):
        setup.play()


def test_a_trunk_and_a_replay_are_tried_again_and_then_fail_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"": [CALL], TRUNK: ["5", "6"]}
    setup = Setup(said, 2)
    setup.pool.failing_resets = 2
    assert len(setup.play()) == 2
    setup = Setup(said, 2)
    reset = Environment.reset

    async def fails(self: Environment, columns: dict[str, Any], prompt_id: int) -> str | None:
        answer = await reset(self, columns, prompt_id)
        if len(self.pool.resets) in self.pool.fails:  # type: ignore[attr-defined]
            raise EnvironmentFailedError("the process has ended")
        return answer

    monkeypatch.setattr(Environment, "reset", fails)
    setup.pool.fails = (2, 3)  # type: ignore[attr-defined]
    assert [each.reward for each in setup.play()] == [5.0, 5.0]
    setup = Setup(said, 2)
    setup.pool.fails = range(2, 100)  # type: ignore[attr-defined]
    with pytest.raises(LeaseFailure, match="the process has ended") as caught:
        setup.play()
    assert caught.value.reason == "environment_failed"


def test_a_continuation_that_fails_keeps_what_it_sampled() -> None:
    failed, scored = Setup({"": [CALL], TRUNK: ['{"add": {"a": -1}}', "6"]}, 2).play()
    assert (failed.failure, scored.failure) == ("tool add did not return", "")
    assert sampled_text(failed) == ['{"add": {"a": -1}}<|end|>']


def test_an_evaluation_has_no_trunk() -> None:
    setup = Setup({"": ["5", "6"]}, 2)
    setup.lease = msgspec.structs.replace(setup.lease, evaluates=PolicyInfo(1, "0" * 64, 1))
    assert [sampled_text(each) for each in setup.play()] == [["5<|end|>"], ["6<|end|>"]]
    assert len(setup.pool.resets) == 2


def test_a_range_is_drawn_from_by_the_lease_s_id() -> None:
    section = EnvironmentSection.model_validate({"factory": "a:B", "branch_after_turns": [1, 3]})
    leases = [msgspec.structs.replace(test_episodes.lease(1), lease_id=f"0-{n}-0-1-abcdef") for n in range(300)]
    drawn = [trunk_turns(section, each) for each in leases]
    assert [trunk_turns(section, each) for each in leases] == drawn
    assert all(70 < drawn.count(turns) < 130 for turns in (1, 2, 3)), "100 of each are expected, with deviation 8.2"
    assert drawn[:8] == [random.Random(each.lease_id).randint(1, 3) for each in leases[:8]]


class Talker:
    """Says a call, a number or nothing at random, and gives each token a log-prob that follows from its place and its value."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.num_asked = 0

    async def __call__(self, prompt_ids: list[int], sampling: Any) -> list[Completion]:
        self.num_asked += 1
        await asyncio.sleep(0)
        number = self.chance.choice([0, 1, 2, 3, 40])
        text = self.chance.choice([f'{{"add": {{"a": {number}}}}}', str(number)])
        said = [*ids(text), END]
        cut = said[: sampling.max_completion_length]
        return [Completion(cut, logprobs_of(len(prompt_ids), cut), len(cut) < len(said), [1] * len(cut))]


def logprobs_of(start: int, token_ids: list[int]) -> list[float]:
    return [-(start + place) / 64 - token / 128 for place, token in enumerate(token_ids)]


class AddingPool(test_episodes.Pool):
    def __init__(self) -> None:
        super().__init__()
        self.rewards_turns = self.replies = True

    @asynccontextmanager
    async def session(self):
        yield Adding(self)


class Adding(Environment):
    """Adds what calls and turns say; 0 ends an episode."""

    async def reply(self, text: str) -> list[dict[str, Any]]:
        self.sum += int(text)
        return [{"role": "user", "content": f"sum {self.sum}"}] if int(text) else []

    async def turn_reward(self) -> float | None:
        return float(self.sum) if self.sum % 2 else None

    async def reward(self) -> float | None:
        return float(self.sum)


REWRITING = "{{ messages | length }}" + PLAIN  # every history anew


@pytest.mark.long
@pytest.mark.parametrize("template", [PLAIN, REWRITING], ids=["plain", "rewriting"])
def test_random_groups(template: str) -> None:
    """Rewards are of the whole conversation, and of what is behind the branch all that was sampled, and nothing else, is."""
    branched, forked, written_by = 0, 0, tokenizer(template)
    for seed in range(40):
        chance = random.Random(seed)
        room, turn_tokens = chance.randint(30, 250), chance.choice([None, None, 12])
        setup = Setup({}, 3, chance.randint(1, 4), room=room, max_turns=5, max_turn_tokens=turn_tokens)
        setup.pool = AddingPool()
        setup.source.pool, setup.sampler = setup.pool, Talker(seed)  # type: ignore[assignment]
        setup.source.chat.tokenizer, setup.source.chat.max_model_len = written_by, 400
        episodes = setup.play()
        for episode in episodes:
            _check(episode, room)
        [branch_length] = {each.branch_length for each in episodes}
        assert (branch_length > 0) == setup.counters.branched_groups
        start = branch_length or episodes[0].prompt_length
        assert len({tuple(each.records[0].token_ids[:start]) for each in episodes}) == 1
        branched += branch_length > 0
        forked += any(len(each.records) > 1 for each in episodes)
    assert branched > 20
    assert (forked > 10) == (template is REWRITING)


def _check(episode: Episode, room: int) -> None:
    assert episode.records[0].first_sampled == (episode.branch_length or episode.prompt_length)
    for record in episode.records:
        assert len(record.token_ids) <= episode.prompt_length + room
        places = np.flatnonzero(record.is_sampled).tolist()
        expected = [logprobs_of(place, [record.token_ids[place]])[0] for place in places]
        np.testing.assert_allclose(record.logprobs[places], expected, rtol=1e-6)
        assert not record.logprobs[~record.is_sampled].any()
        assert record.is_sampled[~np.isnan(record.credit)].all()
    said = [each for each in episode.messages if each["role"] == "assistant"]
    assert len(said) <= 5
    was_cut = episode.records[-1].token_ids[-1] != END
    total = 0
    for number, message in enumerate(said, 1):
        calls = message.get("tool_calls", [])
        total += sum(call["function"]["arguments"]["a"] for call in calls if number < 5)
        total += 0 if calls or (was_cut and number == len(said)) else int(message["content"])
    assert episode.reward == total
