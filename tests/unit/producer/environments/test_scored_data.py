"""Groups of environments, worked by hand: what is trained of them, and what is refused."""

import json

import numpy as np
import pytest

from producer.calls.recorded import RecordedCall, RecordedCalls
from producer.calls.refusals import RefusedError
from producer.calls.requests import decode_body
from producer.environments.scored_data import ScoredData, ScoredGroups, match_group
from producer.groups import group_message
from protocol.wire.messages import Group, Sampling
from tests.unit.producer.calls.test_recorded_calls import sampled


def recorded(*calls) -> RecordedCalls:
    result = RecordedCalls(clock=lambda: 10.0)
    for call in calls:
        result.note(call)
    return result


def match(
    calls: RecordedCalls, *sequences: list[int], scores=(1.0, 0.0), longest: int = 8, **fields
) -> tuple[Group, set[RecordedCall]]:
    """As it goes on the wire. A negative token is masked."""
    tokens = [[abs(token) for token in each] for each in sequences]
    masks = [[token if token > 0 else -100 for token in each] for each in sequences]
    data = ScoredData(**{"tokens": tokens, "masks": masks, "scores": list(scores)} | fields)
    rollouts, used = match_group(data, calls, Sampling(2, longest, 1.0), now=12.5)
    return group_message("", rollouts.episodes, rollouts.own_rewards, longest, rollouts.generation_s, 0.0), used


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def test_a_group_of_one_turn():
    calls = recorded(sampled([1, 2], [7, 8], 3), sampled([1, 2], [9], 4, "length"))
    group, used = match(calls, [-1, -2, 7, 8], [-1, -2, 9])
    assert len(used) == 2
    assert (group.lease_id, group.policy_version, group.generation_s) == ("", 3, 2.5)
    assert ints(group.prompt_ids) == [1, 2]
    assert ints(group.completion_lengths) == [2, 1]
    assert ints(group.completion_ids) == [7, 8, 9]
    assert ints(group.token_versions) == [3, 3, 4]
    np.testing.assert_allclose(np.frombuffer(group.logprobs, "<f4"), [-0.07, -0.08, -0.09], rtol=1e-6)
    assert np.frombuffer(group.rewards, "<f4").tolist() == [1.0, 0.0]
    assert list(group.truncated) == [0, 1]
    assert (group.sampled, group.episodes) == (b"", b"")


def test_what_the_environment_masks_is_shown_and_not_trained():
    calls = recorded(sampled([1], [7, 8]), sampled([1, 7, 8, 5], [9, 9]), sampled([1], [6]))
    group, used = match(calls, [-1, -7, 8, -5, 9, 9, -4], [-1, 6])
    assert ints(group.prompt_ids) == [1]
    assert ints(group.completion_ids) == [7, 8, 5, 9, 9, 6]  # without what follows the last trained token
    assert list(group.sampled) == [0, 1, 0, 1, 1, 1]
    assert np.frombuffer(group.logprobs, "<f4")[[0, 2]].tolist() == [0.0, 0.0]
    assert len(used) == 3


def test_a_call_of_which_nothing_is_trained_stays_for_others():
    calls = recorded(sampled([1], [7]), sampled([1, 7, 5], [8]), sampled([1, 7, 5], [9]))
    _, used = match(calls, [-1, -7, -5, 8], [-1, -7, -5, 9])
    assert sorted(call.token_ids.tolist() for call in used) == [[8], [9]]


def test_equal_answers_are_different_calls_and_no_call_is_trained_twice():
    calls = recorded(sampled([1], [7], 3), sampled([1], [7], 4))
    group, used = match(calls, [-1, 7], [-1, 7])
    assert sorted(ints(group.token_versions)) == [3, 4]
    calls.remove(list(used)[:1])
    with pytest.raises(RefusedError, match="sequence 1: 1 of 1 tokens to be trained, the first at place 1, were not"):
        match(calls, [-1, 7], [-1, 7])


def test_the_end_that_a_template_writes_behind_an_answer_is_not_trained():
    calls = recorded(sampled([1], [7, 8]), sampled([1], [9]))
    group, _ = match(calls, [-1, 7, 8, 20, 21], [-1, 9])
    assert ints(group.completion_ids) == [7, 8, 9]
    with pytest.raises(RefusedError, match="sequence 0: 5 of 7 tokens to be trained, the first at place 3"):
        match(calls, [-1, 7, 8, 20, 21, 22, 23, 24], [-1, 9])
    inside = recorded(sampled([1], [7]), sampled([1, 7, 20, 5], [8]), sampled([1], [9]))
    group, _ = match(inside, [-1, 7, 20, -5, 8], [-1, 9])
    assert list(group.sampled) == [1, 0, 0, 1, 1]
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


def test_prompts_that_differ_count_as_part_of_the_completion():
    calls = recorded(sampled([1, 2], [7, 7, 7]), sampled([1, 3, 4], [8]))
    group, _ = match(calls, [-1, -2, 7, 7, 7], [-1, -3, -4, 8], longest=3)
    assert ints(group.prompt_ids) == [1]
    assert ints(group.completion_ids) == [2, 7, 7, 3, 4, 8]
    assert list(group.truncated) == [1, 0]


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
