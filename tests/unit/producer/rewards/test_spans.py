"""Rewards of spans: what a function may return in place of a number, and which token each reward lies on."""

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from producer.engine_contract import Completion
from producer.groups import Episode, Record, group_message
from producer.rewards.http_reward import _Answer
from producer.rewards.messages import Job, Scores
from producer.rewards.pool import RewardPool, Scored
from producer.rewards.spans import Spans, ends_in_tokens
from producer.rewards.thinking import with_hidden_rows
from producer.rewards.worker import Made, _score, checked
from replay.groups import GroupShape, RolloutGroup
from tests.unit.producer.rewards.test_rewards import Seen, section, with_pool

TEXT, IDS = "ab cdé f", [10, 11, 12, 13]
PIECES = {10: "ab", 11: " c", 12: "dé", 13: " f", 14: "<end>"}


class Tokenizer:
    """Of the tokens in `PIECES`; 14 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(PIECES[token] for token in ids if token != 14 or not skip_special_tokens)


def decode(ids: list[int]) -> str:
    return Tokenizer().decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("returned", "completion", "said"),
    [
        ({}, TEXT, "return {"),
        ({"words": [(1, 1.0)]}, TEXT, "return {"),
        ({"tokens": [(1, 1.0)], "characters": [(1, 1.0)]}, TEXT, "return {"),
        ({"tokens": []}, TEXT, "return {"),
        ({"tokens": [1, 2]}, TEXT, "span 0: 1"),
        ({"tokens": [(1, 1.0), (2, 1.0, 3)]}, TEXT, "span 1: (2, 1.0, 3)"),
        ({"tokens": [(1.0, 1.0)]}, TEXT, "whole number"),
        ({"tokens": [(True, 1.0)]}, TEXT, "whole number"),
        ({"tokens": [(0, 1.0)]}, TEXT, "span 0, which ends at 0 and begins at 0"),
        ({"tokens": [(3, 1.0), (2, 1.0)]}, TEXT, "span 1, which ends at 2 and begins at 3"),
        ({"tokens": [(3, 1.0), (3, 1.0)]}, TEXT, "span 1, which ends at 3 and begins at 3"),
        ({"tokens": [(5, 1.0)]}, TEXT, "ends at 5, and the completion has 4 tokens"),
        ({"characters": [(9, 1.0)]}, TEXT, "ends at 9, and the completion has 8 characters"),
        ({"tokens": [(2, 1.0), (4, math.nan)]}, TEXT, "span 1, whose reward is nan"),
        ({"tokens": [(2, math.inf)]}, TEXT, "span 0, whose reward is inf"),
        ({"tokens": [(2, None)]}, TEXT, "span 0, whose reward is None"),
        ({"tokens": [(2, 3e38), (3, 3e38)]}, TEXT, "is 6e+38"),
        ({"characters": [(1, 1.0)]}, [{"role": "assistant", "content": "a"}] * 2, "several messages"),
    ],
)
def test_what_is_no_span_is_refused_with_its_place_and_costs_its_completion_alone(
    returned: dict[str, Any], completion: Any, said: str
) -> None:
    found = checked([returned, 1.0], Job("p", [completion, "x"], [IDS, [1]], {}))
    assert found.rewards == pytest.approx([math.nan, 1.0], nan_ok=True)
    reason, problem = found.failed[0]
    assert reason == "invalid"
    assert said in problem
    assert problem.startswith("reward 0 ")
    assert found.spans == {}


def test_a_completion_with_spans_is_worth_their_sum() -> None:
    job = Job("p", [TEXT, "x", "y"], [IDS, [1], [2]], {})
    returned = [{"tokens": ((1, 0.5), [np.int64(4), np.float32(2)])}, None, 3.0]
    found = _score(Made.of(lambda **_: returned, "f"), job)
    assert found.rewards == pytest.approx([2.5, math.nan, 3.0], nan_ok=True)
    assert found.spans == {0: Spans("tokens", [1, 4], [0.5, 2.0])}
    hidden = with_hidden_rows(found, {0: 7.0})
    assert hidden.rewards == pytest.approx([7.0, 2.5, math.nan, 3.0], nan_ok=True)
    assert list(hidden.spans) == [1]


def test_a_service_answers_with_spans_too() -> None:
    body = b'{"rewards": [{"tokens": [[1, 0.5], [4, 2]]}, null, 3]}'
    answer = msgspec.json.decode(body, type=_Answer)
    found = checked(answer.rewards, Job("p", [TEXT, "x", "y"], [IDS, [1], [2]], {}))
    assert found.rewards == pytest.approx([2.5, math.nan, 3.0], nan_ok=True)
    assert found.spans == {0: Spans("tokens", [1, 4], [0.5, 2.0])}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"rewards": [{"tokens": [[1.5, 0.5]]}]}', type=_Answer)


@pytest.mark.parametrize("completion", [TEXT, [{"role": "assistant", "content": TEXT}]])
def test_a_span_in_characters_ends_with_the_token_of_its_last_character(completion: Any) -> None:
    spans = Spans.of({"characters": [(1, 1.0), (2, 2.0), (3, 3.0), (6, 4.0), (8, 5.0)]}, completion, 5)
    assert spans.in_tokens(completion, [*IDS, 14], decode).ends == [1, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="in tokens"):
        spans.in_tokens("ab cd", IDS, decode)


def test_as_many_spans_as_characters_take_hardly_more_texts_than_there_are_tokens() -> None:
    ids, text = list(range(100)), "abc" * 100
    read = list[int]()

    def decode(ids: list[int]) -> str:
        read.append(len(ids))
        return "abc" * len(ids)

    spans = Spans("characters", list(range(1, 301)), [0.0] * 300).in_tokens(text, ids, decode)
    assert spans.ends == [1 + place // 3 for place in range(300)]
    assert len(read) < 2 * 100
    read.clear()
    assert Spans("characters", [150, 300], [0.0] * 2).in_tokens(text, ids, decode).ends == [50, 100]
    assert len(read) < 30


@pytest.mark.parametrize("strips", [False, True], ids=["bytes", "strips its first space"])
def test_ends_are_those_of_whole_beginnings(strips: bool) -> None:
    """The reference decodes each beginning as a whole."""
    draw = random.Random(7)
    pieces = [b"a", b" ", b" is", b"\xc3", b"\xa9", "🐌".encode(), b"\xf0\x9f", b"\x90\x8c", b"\xff", "é".encode()]

    def decode(ids: list[int]) -> str:
        text = b"".join(pieces[token] for token in ids).decode(errors="replace")
        return text.removeprefix(" ") if strips else text

    for _ in range(40):
        ids = draw.choices(range(len(pieces)), k=200)
        text = decode(ids)
        ends = sorted(draw.sample(range(1, len(text) + 1), 60))
        expected = [next(num for num in range(201) if decode(ids[:num]).startswith(text[:end])) for end in ends]
        assert ends_in_tokens(text, ends, ids, decode) == expected


def test_the_cost_of_many_ends_grows_as_the_number_of_tokens() -> None:
    read = list[int]()

    def decode(ids: list[int]) -> str:
        read.append(len(ids))
        return "abc" * len(ids)

    costs = []
    for num in (200, 1600):
        read.clear()
        assert ends_in_tokens("abc" * num, list(range(3, 3 * num, 3)), list(range(num)), decode) == list(range(1, num))
        costs.append(sum(read))
    assert costs[1] < 1.5 * 8 * costs[0]


def scored(functions: dict[str, list[Any]], weights: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Scored:
    """By a pool whose functions return these values for two completions, of the tokens of `TEXT` and of 10."""

    async def ask_all(self: RewardPool, jobs: list[Job]) -> list[Scores]:
        return [checked(returned, job) for returned, job in zip(functions.values(), jobs, strict=True)]

    monkeypatch.setattr(RewardPool, "_ask_all", ask_all)
    made = section(*({"function": f"m:{name}", "weight": weights.get(name, 1.0)} for name in functions))

    async def use(pool: RewardPool) -> Scored:
        pool.read_with(Tokenizer(), {})
        return await pool.score("p", [TEXT, "ab"], [IDS, [10]], {})

    monkeypatch.setattr(RewardPool, "start", lambda self: _nothing())
    return with_pool(made, use, Seen())


async def _nothing() -> None:
    pass


def test_spans_of_several_functions_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "first": [{"tokens": [(1, 1.0), (4, 3.0)]}, {"tokens": [(1, 2.0)]}],
        "second": [{"characters": [(3, 1.0)]}, 5.0],
        "observed": [{"tokens": [(2, 9.0)]}, 5.0],
    }
    found = scored(functions, {"first": 0.5, "observed": 0.0}, monkeypatch)
    np.testing.assert_array_equal(found.rewards, [[4, 1, 9], [2, 5, 5]])
    assert [list(each) for each in found.spans] == [[(1, 0.5), (4, 1.5), (2, 1.0)], [(1, 1.0)]]


def test_a_completion_that_one_function_failed_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"first": [{"tokens": [(1, 1.0)]}, {"tokens": [(1, 2.0)]}], "second": [{"tokens": [(9, 1.0)]}, 5.0]}
    found = scored(functions, {}, monkeypatch)
    assert np.isnan(found.rewards[0]).all()
    assert [list(each) for each in found.spans] == [[], [(1, 2.0)]]
    [missing] = found.failures.entries()
    assert (missing.function, missing.reason, missing.completions) == ("second", "invalid", (0,))


# On the tokens.


SHAPE = GroupShape(num_generations=2, num_rewards=1, max_completion_length=6, vocab_size=50)


def played() -> Episode:
    """The prompt 1, 2; sampled 10, 11; shown 20, 21; sampled 12, 13."""
    record = Record.of([1, 2])
    for shown, ids in (([], [10, 11]), ([20, 21], [12, 13])):
        record.show(shown)
        record.sampled(Completion(ids, [-0.5] * len(ids), False, [3] * len(ids)))
    return Episode(2, [record])


def parsed(*episodes: Episode) -> RolloutGroup:
    rewards = np.zeros((2, 1), np.float32)
    return SHAPE.parse(group_message("lease-1", list(episodes), rewards, SHAPE.max_completion_length, 0.5, 0.25))


def credit_of(*episodes: Episode) -> dict[int, float]:
    group = parsed(*episodes)
    return group.span_rewards(slice(0, group.num_tokens))


def test_a_reward_lies_on_the_last_sampled_token_of_its_span() -> None:
    first, second = played(), played()
    first.reward_spans([(1, 1.0), (4, 2.0), (6, 0.0)])  # the second ends with what was shown
    second.reward_spans([(2, 0.5), (3, 0.25)])  # so does the third, in which nothing was sampled
    assert credit_of(first, second) == {0: 1.0, 1: 2.0, 5: 0.0, 7: 0.75}


def test_a_reward_before_the_first_sampled_token_lies_on_it() -> None:
    episode = played()
    episode.prompt_length = 0
    episode.reward_spans([(1, 1.0)])
    assert credit_of(episode, played()) == {0: 1.0}


def test_a_record_that_loses_its_end_keeps_the_rewards() -> None:
    """The prompts have one token in common, so the record is one token too long."""
    long, other = played(), Episode.of([1], Completion([9], [-0.5], False, [3]))
    long.reward_spans([(1, 1.0), (5, 0.5), (6, 2.0)])
    group = parsed(long, other)
    assert group.completion_lengths.tolist() == [6, 1]
    assert group.completion_ids[5] == 12
    assert group.span_rewards(slice(0, 6)) == {1: 1.0, 5: 2.5}


def test_without_rewards_of_spans_nothing_is_sent() -> None:
    group = parsed(played(), played())
    assert (group.credit, group.span_ends) == (None, None)
    rewarded = played()
    rewarded.reward_spans([(1, 1.0)])
    rewarded.forget_spans()
    assert parsed(rewarded, played()).credit is None
