"""Groups of environments, worked by hand: what is trained of them, and what is refused."""

import json

import numpy as np
import pytest

from producer.groups import Rollouts, group_message
from protocol.wire.messages import Sampling
from replay.credit import CreditRecipe
from replay.groups import GroupShape
from slipstream_extras.endpoint.atropos.recorded import RecordedCall, RecordedCalls
from slipstream_extras.endpoint.atropos.scored_data import ScoredData, ScoredGroups, match_group
from slipstream_extras.endpoint.openai import RefusedError, decode_body
from tests.unit.slipstream_extras.endpoint.test_recorded_calls import sampled


def recorded(*calls) -> RecordedCalls:
    result = RecordedCalls(clock=lambda: 10.0)
    for call in calls:
        result.note(call)
    return result


def match(
    calls: RecordedCalls, *sequences: list[int], takes_advantages: bool = False, **fields
) -> tuple[Rollouts, set[RecordedCall]]:
    """Of two sequences, in which negative tokens are masked."""
    tokens = [[abs(token) for token in each] for each in sequences]
    masks = [[token if token > 0 else -100 for token in each] for each in sequences]
    data = ScoredData(**{"tokens": tokens, "masks": masks, "scores": [1.0, 0.0]} | fields)
    return match_group(data, calls, Sampling(2, 8, 1.0), now=12.5, takes_advantages=takes_advantages)


def sampled_of(rollouts: Rollouts) -> list[list[int]]:
    """Which tokens of each sequence are trained."""
    return [episode.records[0].is_sampled.astype(int).tolist() for episode in rollouts.episodes]


def test_a_group_of_one_turn():
    calls = recorded(sampled([1, 2], [7, 8], 3), sampled([1, 2], [9], 4, "length"))
    rollouts, used = match(calls, [-1, -2, 7, 8], [-1, -2, 9])
    assert (len(used), rollouts.generation_s, rollouts.own_rewards.tolist()) == (2, 2.5, [[1.0], [0.0]])
    (one,), (other,) = (episode.records for episode in rollouts.episodes)
    assert (one.token_ids, other.token_ids) == ([1, 2, 7, 8], [1, 2, 9])
    assert (one.versions.tolist(), other.versions.tolist()) == ([-1, -1, 3, 3], [-1, -1, 4])
    np.testing.assert_allclose([*one.logprobs, *other.logprobs], [0, 0, -0.07, -0.08, 0, 0, -0.09], rtol=1e-6)
    assert [(each.prompt_length, each.truncated) for each in rollouts.episodes] == [(2, False), (2, True)]


def test_what_the_environment_masks_is_shown_and_not_trained():
    calls = recorded(sampled([1], [7, 8]), sampled([1, 7, 8, 5], [9, 9]), sampled([1], [6]))
    rollouts, used = match(calls, [-1, -7, 8, -5, 9, 9, -4], [-1, 6])
    assert rollouts.episodes[0].records[0].token_ids == [
        1,
        7,
        8,
        5,
        9,
        9,
    ]  # without what follows the last trained token
    assert sampled_of(rollouts) == [[0, 0, 1, 0, 1, 1], [0, 1]]
    assert len(used) == 3


def test_a_call_of_which_nothing_is_trained_stays_for_others():
    calls = recorded(sampled([1], [7]), sampled([1, 7, 5], [8]), sampled([1, 7, 5], [9]))
    _, used = match(calls, [-1, -7, -5, 8], [-1, -7, -5, 9])
    assert sorted(call.token_ids.tolist() for call in used) == [[8], [9]]


def test_equal_answers_are_different_calls_and_no_call_is_trained_twice():
    calls = recorded(sampled([1], [7], 3), sampled([1], [7], 4))
    rollouts, used = match(calls, [-1, 7], [-1, 7])
    assert rollouts.versions == {3, 4}
    calls.remove(list(used)[:1])
    with pytest.raises(RefusedError, match="sequence 1: 1 of 1 tokens to be trained, the first at place 1, were not"):
        match(calls, [-1, 7], [-1, 7])


def test_the_end_that_a_template_writes_behind_an_answer_is_not_trained():
    calls = recorded(sampled([1], [7, 8]), sampled([1], [9]))
    assert sampled_of(match(calls, [-1, 7, 8, 20, 21], [-1, 9])[0]) == [[0, 1, 1], [0, 1]]
    with pytest.raises(RefusedError, match="sequence 0: 5 of 7 tokens to be trained, the first at place 3"):
        match(calls, [-1, 7, 8, 20, 21, 22, 23, 24], [-1, 9])
    inside = recorded(sampled([1], [7]), sampled([1, 7, 20, 5], [8]), sampled([1], [9]))
    assert sampled_of(match(inside, [-1, 7, 20, -5, 8], [-1, 9])[0]) == [[0, 1, 0, 0, 1], [0, 1]]
    within = recorded(sampled([1], [7, 8, 6, 5]), sampled([1], [9]))
    with pytest.raises(RefusedError, match="sequence 0: 2 of 4 tokens to be trained, the first at place 3"):
        match(within, [-1, 7, 8, 20, 21], [-1, 9])  # another answer, which begins in the same way


@pytest.mark.parametrize(
    ("one", "said"),
    [
        pytest.param([-1, 2, 7, 8], "were not sampled here behind these tokens", id="of the prompt"),
        pytest.param([-1, -2, 6, 8], "were not sampled here behind these tokens", id="another answer"),
        pytest.param([-1, -3, 7, 8], "were not sampled here behind these tokens", id="another prompt"),
        pytest.param([-1, -2, 78], "were not sampled here behind these tokens", id="tokenized otherwise"),
        pytest.param([-1, -2, -7, -8], "sequence 0: it has no token to be trained", id="all masked"),
    ],
)
def test_a_token_that_was_not_sampled_is_not_trained(one: list[int], said: str):
    with pytest.raises(RefusedError, match=said):
        match(recorded(sampled([1, 2], [7, 8]), sampled([1, 2], [9])), one, [-1, -2, 9])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": [[1, 7]], "masks": [[-100, 7]], "scores": [1.0]}, "--env.group_size 2"),
        ({"scores": [1.0, 0.0, 0.0]}, "this one has 2, 2 and 3"),
        ({"masks": [[-100], [-100, 8]]}, "a mask has one entry per token"),
        ({"masks": [[-100, 1], [-100, 8]]}, "a mask has one entry per token"),
        ({"advantages": [[0.0, 1.0], [0.0, 1.0]]}, "advantages follow from the scores"),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, "overrides are not honoured"),
        ({"group_overrides": {"temperature": 2}}, "overrides are not honoured"),
        ({"images": ["x"]}, "images cannot be trained"),
        ({"distill_token_ids": [[[1]]]}, "distill_token_ids cannot"),
        ({"distill_logprobs": [[[1]]]}, "distill_logprobs cannot"),
        ({"tokens": [[1, 7], [2, 9]], "masks": [[-100, 7], [-100, 9]]}, "have no token in common"),
    ],
)
def test_what_contradicts_itself_or_is_not_done_is_refused(fields, said):
    calls = recorded(sampled([1], [7]), sampled([1], [8]), sampled([2], [9]))
    assert match(calls, [-1, 7], [-1, 8], advantages=[], overrides=[{}, {}], group_overrides={"group_size": 2})
    with pytest.raises(RefusedError, match=said):
        match(calls, [-1, 7], [-1, 8], **fields)


def test_posted_advantages_are_those_of_the_tokens_that_are_trained():
    calls = recorded(sampled([1], [7, 8]), sampled([1, 7, 8, 5], [9]), sampled([1], [6]))
    advantages = [[9.0, 0.5, 0.0, 9.0, -2.0], [9.0, 0.25]]
    rollouts, _ = match(
        calls, [-1, 7, 8, -5, 9], [-1, 6], takes_advantages=True, advantages=advantages, scores=[1.0, 1.0]
    )
    message = group_message("lease", rollouts.episodes, rollouts.own_rewards, 8, 0.0, 0.0, is_given=True)
    group = GroupShape(2, 1, 8, 100).parse(message)
    recipe = CreditRecipe("given")
    assert recipe.advantages(group, np.array([7.0, 7.0])).tolist() == [0.5, 0.0, 0.0, -2.0, 0.25]
    assert recipe.signal(group, 7.0) == 2.75


def test_of_a_group_that_loses_its_end_the_advantages_stay_where_they_were():
    calls = recorded(sampled([1], [7, 8, 9]), sampled([1], [6]))
    rollouts, _ = match(
        calls, [-1, 7, 8, 9], [-1, 6], takes_advantages=True, advantages=[[0.0, 1.0, 2.0, 4.0], [0.0, 8.0]]
    )
    message = group_message("lease", rollouts.episodes, rollouts.own_rewards, 2, 0.0, 0.0, is_given=True)
    assert np.frombuffer(message.credit, "<f4").tolist() == [1.0, 2.0, 8.0]


@pytest.mark.parametrize(
    ("advantages", "said"),
    [
        ([[0.0, 1.0]], "1 lists of advantages are posted for 2 sequences"),
        ([[0.0, 1.0], [0.0]], "sequence 1: it has 1 advantages for 2 tokens"),
        ([[0.0, 1.0], None], "sequence 1: it has 0 advantages for 2 tokens"),
    ],
)
def test_advantages_of_another_shape_are_refused(advantages, said):
    with pytest.raises(RefusedError, match=said):
        match(
            recorded(sampled([1], [7]), sampled([1], [8])), [-1, 7], [-1, 8],
            takes_advantages=True, advantages=advantages,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scores", "[NaN]"),
        ("scores", "[1e300]"),
        ("scores", "[null]"),
        ("tokens", "[[-1]]"),
        ("tokens", "[[2147483648]]"),
        ("tokens", '[["1"]]'),
        ("masks", "[[-101]]"),
        ("overrides", "5"),
        ("advantages", "true"),
        ("advantages", "[1.0]"),
        ("advantages", "[[NaN]]"),
        ("advantages", "[[1e39]]"),
        ("group_overrides", "[1]"),
        ("scores", "[1]}, {"),
        ("scores", "[" * 100_000),
    ],
)
def test_what_is_no_scored_data_is_refused(field, value):
    fields = {"tokens": "[[1]]", "masks": "[[1]]", "scores": "[1]"} | {field: value}
    body = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
    with pytest.raises(RefusedError, match="not the scored data of Atropos"):
        decode_body(body.encode(), ScoredData, "the scored data of Atropos")


def test_fields_that_are_not_needed_are_not_looked_at():
    group = {
        "tokens": [[1]],
        "masks": [[1]],
        "scores": [1],
        "messages": None,
        "inference_logprobs": [[0.1]],
        "env_id": 3,
    }
    assert decode_body(json.dumps([group, group]).encode(), ScoredGroups, "")[1].scores == [1.0]
    with pytest.raises(RefusedError):
        decode_body(json.dumps([group] * 1025).encode(), ScoredGroups, "")
