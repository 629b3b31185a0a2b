"""A wire message becomes a group only if every buffer is consistent and in range."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from protocol.wire.messages import Group, Logged
from replay.groups import GroupShape, InvalidGroupError, message_of
from tests.unit.replay.builders import SHAPE, group_message

SIGNALING_NAN = b"\x01\x00\x80\x7f"  # float32; the largest of other values and it is NaN for some CPUs


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_a_valid_message_comes_out_as_it_went_in() -> None:
    group = SHAPE.parse(group_message("s-7", 3))
    assert (group.lease_id, group.policy_version) == ("s-7", 3)
    assert group.prompt_ids.tolist() == [1, 2]
    assert group.completion_lengths.tolist() == [3, 1]
    assert group.completion_ids.tolist() == [3, 4, 5, 6]
    np.testing.assert_array_equal(group.logprobs, np.array([-0.1, -0.2, -0.3, -0.4], np.float32))
    assert group.rewards.tolist() == [[0.0], [1.0]]
    assert group.truncated.tolist() == [False, True]
    assert (group.num_completions, group.num_tokens) == (2, 4)


def test_rewards_are_completion_by_function() -> None:
    shape = GroupShape(num_generations=2, num_rewards=3, max_completion_length=4, vocab_size=10)
    group = shape.parse(group_message(rewards=floats(1, 2, 3, 4, 5, 6), logprobs=floats(1e-4, 0, -1, -2)))
    assert group.rewards.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert group.num_tokens == 4, "a log-prob that rounding took above zero passes"


TOP_IDS, TOP_LOGPROBS = (3, 7, 8, 7, -1, 1, 6, -1), (-1, -1, -2, -0.5, 0, -1, -1, 0)


def top(ids: tuple[int, ...] = TOP_IDS, values: tuple[float, ...] = TOP_LOGPROBS, **changes: bytes) -> dict[str, bytes]:
    """Of two likely tokens in the place of each of 3, 4, 5 and 6."""
    fields = {"teacher_logprobs": floats(-1, -2, -1, -1), "teacher_top_ids": ints(*ids)}
    return fields | {"teacher_top_logprobs": floats(*values)} | changes


def changed(values: tuple[Any, ...], place: int, value: float) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


REFUSED_TOPS: list[tuple[dict[str, Any], str]] = [
    ({"ids": TOP_IDS[:-1]}, "teacher_top_ids has 28 bytes, expected 4 x 4"),
    ({"ids": TOP_IDS[:3]}, "teacher_top_ids has 12 bytes, expected 4 x 4 x (1 to 32)"),
    ({"ids": TOP_IDS * 17, "values": TOP_LOGPROBS * 17}, "expected 4 x 4 x (1 to 32)"),
    ({"values": TOP_LOGPROBS[:4]}, "teacher_top_logprobs has 16 bytes, expected 8 x 4"),
    ({"ids": changed(TOP_IDS, 3, 10)}, "teacher_top_ids must lie in -1..9, unlike those at token 1"),
    ({"ids": changed(TOP_IDS, 3, -2)}, "teacher_top_ids must lie in -1..9, unlike those at token 1"),
    ({"ids": changed(TOP_IDS, 3, 8)}, "repeat a token, unlike those at token 1"),
    *(
        ({"values": changed(TOP_LOGPROBS, 5, value)}, "and 0 beside a token -1, unlike those at token 2")
        for value in (math.nan, math.inf, -math.inf, 0.5)
    ),
    ({"values": changed(TOP_LOGPROBS, 4, -1)}, "and 0 beside a token -1, unlike those at token 2"),
    ({"values": changed(TOP_LOGPROBS, 5, -0.4)}, "add up to at most 1, unlike those at token 2"),
    ({"values": changed(TOP_LOGPROBS, 1, -0.4)}, "add up to at most 1, unlike those at token 0"),
    (
        {"sampled": bytes([1, 0, 1, 1]), "logprobs": bytes(16), "teacher_logprobs": floats(-1, 0, -1, -1)},
        "must be -1 for tokens that were not sampled, unlike those at token 1",
    ),
]


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
        ({"logprobs": floats(-1, -1, 0.5) + SIGNALING_NAN}, "logprobs must be finite and not positive"),
        ({"rewards": floats(0)}, "rewards has 4 bytes, expected 2 x 4"),
        ({"rewards": floats(0, 1, 2, 3)}, "rewards has 16 bytes, expected 2 x 4"),
        ({"rewards": floats(0, math.inf)}, "rewards must be finite"),
        ({"completion_ids": ints(3, 4, 5)}, "completion_ids has 12 bytes, expected 4 x 4"),
        ({"completion_ids": ints(3, 4, 5, 10)}, "completion_ids holds token ids outside 0..9"),
        ({"completion_ids": ints(3, 4, 5, -1)}, "completion_ids holds token ids outside 0..9"),
        ({"truncated": b"\0"}, "truncated has 1 bytes, expected 2 x 1"),
        ({"sampled": b"\1\1\1"}, "sampled has 3 bytes, expected 4 x 1"),
        (
            {"sampled": b"\1\0\2\1", "logprobs": bytes(16)},
            "sampled must be 0 or 1, and 1 for some token of each record",
        ),
        (
            {"sampled": b"\1\1\1\0", "logprobs": bytes(16)},
            "sampled must be 0 or 1, and 1 for some token of each record",
        ),
        ({"sampled": b"\1\0\1\1"}, "logprobs must be 0 for tokens that were not sampled"),
        (
            {"sampled": b"\1\0\1\1", "logprobs": floats(-1, math.nan, -1, -1)},
            "logprobs must be 0 for tokens that were not",
        ),
        ({"credit": floats(0, 1, 0)}, "credit has 12 bytes, expected 4 x 4"),
        ({"credit": floats(0, 1, 0, 0)}, "span_ends has 0 bytes, expected 4 x 1"),
        ({"span_ends": b"\0\1\0\0"}, "credit has 0 bytes, expected 4 x 4"),
        ({"credit": bytes(16), "span_ends": bytes(4)}, "span_ends must be 0 or 1, 1 for some token"),
        ({"credit": bytes(16), "span_ends": b"\0\2\0\1"}, "span_ends must be 0 or 1, 1 for some token"),
        (
            {"credit": bytes(16), "span_ends": b"\0\1\0\0", "sampled": b"\1\0\1\1", "logprobs": bytes(16)},
            "0 for tokens that were not sampled",
        ),
        ({"credit": floats(0, 1, 0, 2), "span_ends": b"\0\1\0\0"}, "and is 2.0 at token 3"),
        *(
            ({"credit": floats(0, value, 0, 0), "span_ends": b"\0\1\0\0"}, f"and is {value} at token 1")
            for value in (math.nan, math.inf, -math.inf)
        ),
        ({"credit": floats(math.nan, 1, 0, 0), "span_ends": b"\0\1\0\0"}, "and is nan at token 0"),
        ({"teacher_logprobs": floats(-1, -1, -1)}, "teacher_logprobs has 12 bytes, expected 4 x 4"),
        ({"teacher_logprobs": b"\0" * 15}, "teacher_logprobs has 15 bytes, expected 4 x 4"),
        *(
            ({"teacher_logprobs": floats(-1, -1, value, -1)}, f"and is {value} at token 2")
            for value in (math.nan, math.inf, -math.inf, 0.5)
        ),
        (
            {"teacher_logprobs": floats(-1, -1, -1, -1), "sampled": b"\1\0\1\1", "logprobs": floats(-1, 0, -1, -1)},
            "and is -1.0 at token 1",
        ),
        ({"teacher_top_ids": ints(1, 2, 3, 4)}, "teacher_logprobs is empty, and teacher_top_ids is not"),
        ({"teacher_top_logprobs": floats(-1, -1, -1, -1)}, "teacher_top_ids has 0 bytes, expected 4 x 4 x (1 to 32)"),
        *((top(**changes), reason) for changes, reason in REFUSED_TOPS),
        ({"logged": Logged({"accuracy": math.nan})}, "logged metrics must be finite"),
        ({"logged": Logged(extra={"wanted": ("7",)})}, "logged columns must have a text for each completion"),
        ({"episodes": ints(0, 0)}, "episodes must name each of 0..1, in order"),
        ({"episodes": ints(1, 0)}, "episodes must name each of 0..1, in order"),
        ({"episodes": ints(0, 1, 2)}, "episodes must name each of 0..1, in order"),
        ({"episodes": ints(0, 2**31 - 1)}, "episodes must name each of 0..1, in order"),
        ({"episodes": ints(0, 0, 1)}, "completion_lengths has 8 bytes, expected 3 x 4"),
        ({"episodes": b"\0\0\0"}, "episodes has 3 bytes, expected a multiple of 4"),
        ({"episodes": ints(0, 0, 1), "completion_lengths": ints(2, 1, 1)}, "truncated has 2 bytes, expected 3 x 1"),
    ],
)
def test_every_contradiction_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidGroupError) as caught:
        SHAPE.parse(group_message(**changes))
    assert reason in str(caught.value)


def test_a_group_without_a_teacher_is_refused_where_one_teaches() -> None:
    shape = dataclasses.replace(SHAPE, has_teacher=True)
    with pytest.raises(InvalidGroupError, match="teacher_logprobs is empty"):
        shape.parse(group_message())
    found = shape.parse(group_message(teacher_logprobs=floats(1e-4, 0, -1, -2))).teacher_logprobs
    assert found is not None
    np.testing.assert_array_equal(found, np.array([1e-4, 0, -1, -2], np.float32))


def test_a_teachers_likeliest_tokens_are_as_many_as_the_run_asks_for() -> None:
    shape = dataclasses.replace(SHAPE, has_teacher=True, teacher_top_k=2)
    found = shape.parse(group_message(**top()))
    assert found.teacher_top_ids is not None
    assert found.teacher_top_logprobs is not None
    assert found.teacher_top_ids.tolist() == [[3, 7], [8, 7], [-1, 1], [6, -1]]
    assert found.teacher_top_logprobs.tolist() == [[-1, -1], [-2, -0.5], [0, -1], [-1, 0]]
    with pytest.raises(InvalidGroupError, match="teacher_top_ids has 0 bytes, expected 8 x 4"):
        shape.parse(group_message(teacher_logprobs=floats(-1, -1, -1, -1)))
    with pytest.raises(InvalidGroupError, match="teacher_top_ids has 32 bytes, expected 12 x 4"):
        dataclasses.replace(shape, teacher_top_k=3).parse(group_message(**top()))


def episode_message(**changes: Any) -> Group:
    """Episode 0 of two records, [3, 4] and [3, 5, 6], of which 3 and 4 are results of tools; episode 1 of one, [7]."""
    values = {
        "completion_lengths": ints(2, 3, 1),
        "completion_ids": ints(3, 4, 3, 5, 6, 7),
        "logprobs": floats(-0.1, 0, 0, -0.2, -0.3, -0.4),
        "truncated": bytes([0, 1, 0]),
        "sampled": bytes([1, 0, 0, 1, 1, 1]),
        "episodes": ints(0, 0, 1),
        "token_versions": ints(0, 0, 1, 1, 2, 2),
        "credit": floats(0.5, 0, 0, 0, 0, -1),
        "span_ends": bytes([1, 0, 0, 0, 1, 1]),
        "teacher_logprobs": floats(-0.5, 0, 0, -3, 0, -0.25),
        "teacher_top_ids": ints(3, 2, -1, -1, -1, -1, 2, 3, 6, -1, 1, 7),
        "teacher_top_logprobs": floats(-0.5, -2, 0, 0, 0, 0, -1, -2, 0, 0, -3, -0.25),
    }
    return group_message(**(values | changes))


def test_an_episode_may_take_several_records() -> None:
    group = SHAPE.parse(episode_message())
    assert (group.num_completions, group.num_tokens) == (2, 6)
    assert group.records == [slice(0, 2), slice(2, 5), slice(5, 6)]
    assert group.completion_of.tolist() == [0, 0, 1]
    assert [group.last_record(number) for number in (0, 1)] == [slice(2, 5), slice(5, 6)]
    assert group.is_sampled.tolist() == [True, False, False, True, True, True]
    assert group.sampled_lengths.tolist() == [3, 1]
    assert group.longest_lengths.tolist() == [3, 1]
    assert group.was_truncated.tolist() == [True, False]
    assert group.tokens_by_version(slice(0, 5)) == {0: 1, 1: 1, 2: 1}
    assert group.credit is not None
    assert group.credit.tolist() == [0.5, 0, 0, 0, 0, -1]
    assert group.span_ends is not None
    assert group.span_ends.tolist() == [True, False, False, False, True, True], "one of them is worth 0"


@pytest.mark.parametrize("message", [group_message("s-7", 3), episode_message()], ids=["plain", "episodes"])
def test_a_group_goes_out_as_the_message_that_it_came_in(message: Group) -> None:
    assert message_of(SHAPE.parse(message)) == message


def test_without_episodes_and_results_of_tools_everything_is_of_one_record_and_sampled() -> None:
    group = SHAPE.parse(group_message())
    assert group.records == [slice(0, 3), slice(3, 4)]
    assert [group.last_record(number) for number in (0, 1)] == group.records
    assert group.completion_of.tolist() == [0, 1]
    assert group.is_sampled.all()
    for lengths in (group.sampled_lengths, group.longest_lengths, group.completion_lengths):
        assert lengths.tolist() == [3, 1]
    assert group.was_truncated.tolist() == group.truncated.tolist() == [False, True]
