"""A wire message becomes a group only if every buffer is consistent and in range."""

import math

import numpy as np
import pytest

from replay.groups import GroupShape, InvalidGroupError

from .builders import SHAPE, group_message


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_a_valid_message_comes_out_as_it_went_in() -> None:
    group = SHAPE.parse(group_message("s-7", 3))
    assert (group.group_id, group.policy_version) == ("s-7", 3)
    assert group.prompt_ids.tolist() == [1, 2]
    assert group.completion_lengths.tolist() == [3, 1]
    assert group.completion_ids.tolist() == [3, 4, 5, 6]
    np.testing.assert_array_equal(group.logprobs, np.array([-0.1, -0.2, -0.3, -0.4], np.float32))
    assert group.rewards.tolist() == [[0.0], [1.0]]
    assert group.truncated.tolist() == [False, True]
    assert (group.num_completions, group.num_tokens) == (2, 4)


def test_rewards_are_completion_by_function() -> None:
    shape = GroupShape(num_generations=2, num_rewards=3, max_completion_length=4, vocab_size=10)
    group = shape.parse(group_message(rewards=floats(1, 2, 3, 4, 5, 6)))
    assert group.rewards.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_nan_means_missing_and_passes() -> None:
    group = SHAPE.parse(group_message(rewards=floats(math.nan, 1), logprobs=floats(-0.1, math.nan, -0.3, -0.4)))
    assert np.isnan(group.rewards).tolist() == [[True], [False]]
    assert np.isnan(group.logprobs).tolist() == [False, True, False, False]


def test_rounding_just_above_zero_passes() -> None:
    assert SHAPE.parse(group_message(logprobs=floats(1e-4, 0, -1, -2))).num_tokens == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion_lengths": ints(3)}, "completion_lengths has 4 bytes, expected 2 x 4"),
        ({"completion_lengths": ints(3, 1)[:-1]}, "completion_lengths has 7 bytes, expected 2 x 4"),
        ({"completion_lengths": b""}, "completion_lengths has 0 bytes, expected 2 x 4"),
        ({"completion_lengths": ints(4, 0)}, "completion_lengths must lie in 1..4"),
        ({"completion_lengths": ints(5, -1)}, "completion_lengths must lie in 1..4"),
        ({"completion_lengths": ints(5, 1)}, "completion_lengths must lie in 1..4"),
        ({"completion_lengths": ints(2**31 - 1, 2**31 - 1)}, "completion_lengths must lie in 1..4"),
        ({"completion_lengths": ints(3, 2)}, "logprobs has 16 bytes, expected 5 x 4"),
        ({"prompt_ids": b""}, "prompt_ids is empty"),
        ({"prompt_ids": b"\1\0\0"}, "prompt_ids has 3 bytes, expected a multiple of 4"),
        ({"prompt_ids": ints(1, 10)}, "prompt_ids holds token ids outside 0..9"),
        ({"prompt_ids": ints(-1)}, "prompt_ids holds token ids outside 0..9"),
        ({"logprobs": floats(-1, -1, -1)}, "logprobs has 12 bytes, expected 4 x 4"),
        ({"logprobs": floats(-1, -math.inf, -1, -1)}, "logprobs must be finite and not positive"),
        ({"logprobs": floats(math.nan, -math.inf, -1, -1)}, "logprobs must be finite and not positive"),
        ({"logprobs": floats(-1, math.inf, -1, -1)}, "logprobs must be finite and not positive"),
        ({"logprobs": floats(-1, -1, -1, 0.5)}, "logprobs must be finite and not positive"),
        ({"rewards": floats(0)}, "rewards has 4 bytes, expected 2 x 4"),
        ({"rewards": floats(0, 1, 2, 3)}, "rewards has 16 bytes, expected 2 x 4"),
        ({"rewards": floats(0, math.inf)}, "rewards must be finite"),
        ({"completion_ids": ints(3, 4, 5)}, "completion_ids has 12 bytes, expected 4 x 4"),
        ({"completion_ids": ints(3, 4, 5, 10)}, "completion_ids holds token ids outside 0..9"),
        ({"completion_ids": ints(3, 4, 5, -1)}, "completion_ids holds token ids outside 0..9"),
        ({"truncated": b"\0"}, "truncated has 1 bytes, expected 2 x 1"),
    ],
)
def test_every_contradiction_is_refused_by_name(changes: dict[str, bytes], reason: str) -> None:
    with pytest.raises(InvalidGroupError) as caught:
        SHAPE.parse(group_message(**changes))
    assert reason in str(caught.value)
