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
    calls: RecordedCalls, tokens, masks, scores=(1.0, 0.0), longest: int = 8, **fields
) -> tuple[Group, set[RecordedCall]]:
    """As it goes on the wire."""
    data = ScoredData(tokens, masks, list(scores), **fields)
    rollouts, used = match_group(data, calls, Sampling(2, longest, 1.0), now=12.5)
    return group_message("", rollouts.episodes, rollouts.own_rewards, longest, rollouts.generation_s, 0.0), used


def refusal(*args, **kwargs) -> str:
    with pytest.raises(RefusedError) as caught:
        match(*args, **kwargs)
    return str(caught.value)


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def test_a_group_of_one_turn():
    calls = recorded(sampled([1, 2], [7, 8], 3), sampled([1, 2], [9], 4, "length"))
    group, used = match(calls, [[1, 2, 7, 8], [1, 2, 9]], [[-100, -100, 7, 8], [-100, -100, 9]])
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
    group, used = match(
        calls,
        [[1, 7, 8, 5, 9, 9, 4], [1, 6]],
        [[-100, -100, 8, -100, 9, 9, -100], [-100, 6]],
    )
    assert ints(group.prompt_ids) == [1]
    assert ints(group.completion_ids) == [7, 8, 5, 9, 9, 6]  # without what follows the last trained token
    assert list(group.sampled) == [0, 1, 0, 1, 1, 1]
    assert np.frombuffer(group.logprobs, "<f4")[[0, 2]].tolist() == [0.0, 0.0]
    assert len(used) == 3


def test_a_call_of_which_nothing_is_trained_stays_for_others():
    calls = recorded(sampled([1], [7]), sampled([1, 7, 5], [8]), sampled([1, 7, 5], [9]))
    _, used = match(calls, [[1, 7, 5, 8], [1, 7, 5, 9]], [[-100] * 3 + [8], [-100] * 3 + [9]])
    assert sorted(call.token_ids.tolist() for call in used) == [[8], [9]]


def test_equal_answers_are_different_calls_and_no_call_is_trained_twice():
    calls = recorded(sampled([1], [7], 3), sampled([1], [7], 4))
    twice = ([[1, 7], [1, 7]], [[-100, 7], [-100, 7]])
    group, used = match(calls, *twice)
    assert sorted(ints(group.token_versions)) == [3, 4]
    calls.remove(list(used)[:1])
    assert "sequence 1: 1 of 1 tokens to be trained, the first at place 1, were not sampled" in refusal(calls, *twice)


def test_the_end_that_a_template_writes_behind_an_answer_is_not_trained():
    calls = recorded(sampled([1], [7, 8]), sampled([1], [9]))
    group, _ = match(calls, [[1, 7, 8, 20, 21], [1, 9]], [[-100, 7, 8, 20, 21], [-100, 9]])
    assert ints(group.completion_ids) == [7, 8, 9]
    inside = recorded(sampled([1], [7]), sampled([1, 7, 20, 5], [8]), sampled([1], [9]))
    group, _ = match(inside, [[1, 7, 20, 5, 8], [1, 9]], [[-100, 7, 20, -100, 8], [-100, 9]])
    assert list(group.sampled) == [1, 0, 0, 1, 1]
    longer = [[1, 7, 8, 20, 21, 22, 23, 24], [1, 9]]
    said = refusal(calls, longer, [[-100, *longer[0][1:]], [-100, 9]])
    assert "sequence 0: 5 of 7 tokens to be trained, the first at place 3" in said


def test_a_token_that_was_not_sampled_is_not_trained():
    calls = recorded(sampled([1, 2], [7, 8]), sampled([1, 2], [9]))
    wrong = {
        "of the prompt": ([[1, 2, 7, 8], [1, 2, 9]], [[-100, 2, 7, 8], [-100, -100, 9]]),
        "other answer": ([[1, 2, 6, 8], [1, 2, 9]], [[-100, -100, 6, 8], [-100, -100, 9]]),
        "other prompt": ([[1, 3, 7, 8], [1, 2, 9]], [[-100, -100, 7, 8], [-100, -100, 9]]),
        "tokenized otherwise": ([[1, 2, 78], [1, 2, 9]], [[-100, -100, 78], [-100, -100, 9]]),
    }
    for tokens, masks in wrong.values():
        assert "were not sampled here behind these tokens" in refusal(calls, tokens, masks)
    assert "sequence 1: it has no token to be trained" in refusal(
        calls, [[1, 2, 7], [1, 2, 9]], [[-100, -100, 7], [-100, -100, -100]]
    )


def test_what_contradicts_itself_or_is_not_done_is_refused():
    calls = recorded(sampled([1], [7]), sampled([1], [8]))
    tokens, masks = [[1, 7], [1, 8]], [[-100, 7], [-100, 8]]
    assert match(calls, tokens, masks, advantages=[], overrides=[{}, {}], group_overrides={"group_size": 2})
    assert "--env.group_size 2" in refusal(calls, tokens[:1], masks[:1], [1.0])
    assert "this one has 2, 2 and 3" in refusal(calls, tokens, masks, [1.0, 0.0, 0.0])
    assert "a mask has one entry per token" in refusal(calls, tokens, [[-100], [-100, 8]])
    assert "a mask has one entry per token" in refusal(calls, tokens, [[-100, 1], [-100, 8]])
    assert "advantages follow from the scores" in refusal(calls, tokens, masks, advantages=[[0.0, 1.0], [0.0, 1.0]])
    assert "overrides are not honoured" in refusal(
        calls, tokens, masks, overrides=[{"set_advantage_to_zero": True}, {}]
    )
    assert "overrides are not honoured" in refusal(calls, tokens, masks, group_overrides={"temperature": 2})
    assert "images cannot be trained" in refusal(calls, tokens, masks, images=["x"])
    assert "distill_token_ids cannot" in refusal(calls, tokens, masks, distill_token_ids=[[[1]]])
    other = recorded(sampled([1], [7]), sampled([2], [8]))
    assert "have no token in common" in refusal(other, [[1, 7], [2, 8]], [[-100, 7], [-100, 8]])


def test_prompts_that_differ_count_as_part_of_the_completion():
    calls = recorded(sampled([1, 2], [7, 7, 7]), sampled([1, 3, 4], [8]))
    tokens, masks = [[1, 2, 7, 7, 7], [1, 3, 4, 8]], [[-100, -100, 7, 7, 7], [-100, -100, -100, 8]]
    group, _ = match(calls, tokens, masks, longest=3)
    assert ints(group.prompt_ids) == [1]
    assert ints(group.completion_ids) == [2, 7, 7, 3, 4, 8]
    assert list(group.truncated) == [1, 0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"tokens": [[1]], "masks": [[1]], "scores": [NaN]}',
        b'{"tokens": [[1]], "masks": [[1]], "scores": [1e300]}',
        b'{"tokens": [[-1]], "masks": [[1]], "scores": [1]}',
        b'{"tokens": [[2147483648]], "masks": [[1]], "scores": [1]}',
        b'{"tokens": [[1]], "masks": [[-101]], "scores": [1]}',
        b'{"tokens": [["1"]], "masks": [[1]], "scores": [1]}',
        b'{"tokens": [[1]], "masks": [[1]], "scores": [null]}',
        b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "overrides": 5}',
        b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "advantages": true}',
        b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "group_overrides": [1]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_what_is_no_scored_data_is_refused(body):
    with pytest.raises(RefusedError, match="not the scored data of Atropos"):
        decode_body(body, ScoredData, "the scored data of Atropos")


def test_fields_that_are_not_needed_are_not_looked_at():
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1]} | {
        "messages": None,
        "inference_logprobs": [[0.1]],
        "env_id": 3,
    }
    assert decode_body(json.dumps([group, group]).encode(), ScoredGroups, "")[1].scores == [1.0]
    with pytest.raises(RefusedError):
        decode_body(json.dumps([group] * 1025).encode(), ScoredGroups, "")
