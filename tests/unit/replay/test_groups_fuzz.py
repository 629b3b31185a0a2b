"""`GroupShape.parse` of any group message: InvalidGroupError, or a group that is consistent and in range."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from protocol.wire.messages import Group
from replay.groups import GroupShape, InvalidGroupError, RolloutGroup
from tests.unit.replay.builders import SHAPE, group_message

INT32 = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-(2**31), -1, 0, 1, 4, 5, 9, 10, 2**31 - 1, 2**30])
SHAPES = st.builds(
    GroupShape,
    num_generations=st.integers(2, 5),
    num_rewards=st.integers(1, 3),
    max_completion_length=st.sampled_from([1, 4, 2**24, 2**31 - 1]),
    vocab_size=st.sampled_from([1, 10, 2**31 - 1, 2**31]),
)


def ints(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def floats(values: list[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


@st.composite
def nearly_valid(draw: st.DrawFn, shape: GroupShape) -> Group:
    """A valid message of `shape` with up to two buffers replaced by something else."""
    short = min(shape.max_completion_length, 4)
    records = draw(st.lists(st.integers(1, 2), min_size=shape.num_generations, max_size=shape.num_generations))
    episodes = [number for number, count in enumerate(records) for _ in range(count)]
    lengths = draw(st.lists(st.integers(1, short), min_size=len(episodes), max_size=len(episodes)))
    tokens, rewards = sum(lengths), shape.num_generations * shape.num_rewards
    ids = st.integers(0, min(shape.vocab_size, 2**31) - 1)
    score = st.floats(width=32, allow_infinity=False)
    buffers: dict[str, bytes] = {
        "prompt_ids": ints(draw(st.lists(ids, min_size=1, max_size=4))),
        "completion_lengths": ints(lengths),
        "completion_ids": ints(draw(st.lists(ids, min_size=tokens, max_size=tokens))),
        "logprobs": floats(
            draw(st.lists(st.floats(-100, 0, width=32) | st.just(math.nan), min_size=tokens, max_size=tokens))
        ),
        "rewards": floats(draw(st.lists(score, min_size=rewards, max_size=rewards))),
        "truncated": draw(st.binary(min_size=len(episodes), max_size=len(episodes))),
    }
    if draw(st.booleans()) or len(episodes) > shape.num_generations:
        buffers["episodes"] = ints(episodes)
    if draw(st.booleans()):
        mask = b"".join(b"\1" + draw(st.binary(min_size=n, max_size=n)) for n in (length - 1 for length in lengths))
        buffers["sampled"] = bytes(byte % 2 for byte in mask)
        values = np.frombuffer(buffers["logprobs"], "<f4")
        buffers["logprobs"] = np.where(np.frombuffer(buffers["sampled"], "u1"), values, 0).astype("<f4").tobytes()
    if draw(st.booleans()):
        ends = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens).filter(any))
        if "sampled" in buffers:
            ends = [end and bool(byte) for end, byte in zip(ends, buffers["sampled"], strict=True)]
        buffers["span_ends"] = bytes(ends)
        values = np.array(draw(st.lists(score.filter(math.isfinite), min_size=tokens, max_size=tokens)))
        buffers["credit"] = floats(np.where(ends, values, 0).tolist())
    if draw(st.booleans()):
        values = np.array(draw(st.lists(st.floats(-100, 0, width=32), min_size=tokens, max_size=tokens)))
        mask = np.frombuffer(buffers.get("sampled", b"\1" * tokens), "u1")
        buffers["teacher_logprobs"] = floats(np.where(mask, values, 0).tolist())
        if draw(st.booleans()):
            one = np.array(draw(st.lists(ids, min_size=tokens, max_size=tokens)))
            likeliest = np.where(mask, one, -1)[:, None] * [1, 0] - [0, 1]  # and one that is none
            buffers["teacher_top_ids"] = ints(likeliest.flatten().tolist())
            below = np.log1p(-np.exp(np.minimum(values, -1e-6)))  # what the probability of the token leaves
            buffers["teacher_top_logprobs"] = floats((np.where(likeliest < 0, 0, below[:, None])).flatten().tolist())
    for name in draw(st.lists(st.sampled_from(sorted(buffers)), max_size=2, unique=True)):
        count = len(buffers[name]) // (1 if name in ("truncated", "sampled", "span_ends") else 4)
        same_size = st.lists(INT32, min_size=count, max_size=count).map(ints)
        same_floats = st.lists(st.floats(width=32), min_size=count, max_size=count).map(floats)
        extended = st.binary(max_size=9).map(buffers[name].__add__)
        cut = st.integers(0, len(buffers[name])).map(lambda size, whole=buffers[name]: whole[:size])
        buffers[name] = draw(st.binary(max_size=64) | same_size | same_floats | extended | cut)
    return group_message(**buffers)


def check(shape: GroupShape, group: RolloutGroup, message: Group) -> None:
    """Counted again in plain Python, from the bytes of the message."""
    lengths = [
        int.from_bytes(message.completion_lengths[i : i + 4], "little")
        for i in range(0, len(message.completion_lengths), 4)
    ]
    assert group.completion_lengths.tolist() == lengths
    assert len(group.rewards) == group.num_completions == shape.num_generations
    completion_of = np.frombuffer(message.episodes, "<i4").tolist() or list(range(len(lengths)))
    assert group.completion_of.tolist() == completion_of == sorted(completion_of)
    assert set(completion_of) == set(range(shape.num_generations))
    assert len(lengths) == len(completion_of) == len(group.truncated)
    sampled = [bool(byte) for byte in message.sampled] or [True] * sum(lengths)
    assert group.is_sampled.tolist() == sampled
    assert all(any(sampled[tokens]) for tokens in group.records)
    assert all(logprob == 0 for logprob, one in zip(group.logprobs.tolist(), sampled, strict=True) if not one)
    assert all(1 <= length <= shape.max_completion_length for length in lengths)
    assert group.num_tokens == sum(lengths) == len(group.logprobs)
    assert len(group.prompt_ids) >= 1
    for ids, data in ((group.prompt_ids, message.prompt_ids), (group.completion_ids, message.completion_ids)):
        assert ids.tobytes() == data
        assert all(0 <= token < shape.vocab_size for token in ids.tolist())
    assert group.logprobs.tobytes() == message.logprobs
    assert all(math.isnan(logprob) or -math.inf < logprob <= 1.001e-3 for logprob in group.logprobs.tolist())
    assert group.rewards.shape == (shape.num_generations, shape.num_rewards)
    assert group.rewards.tobytes() == message.rewards
    assert not any(math.isinf(reward) for row in group.rewards.tolist() for reward in row)
    assert (group.credit is None) == (group.span_ends is None) == (not message.credit)
    if group.credit is not None and group.span_ends is not None:
        assert (group.credit.tobytes(), group.span_ends.tobytes()) == (message.credit, message.span_ends)
        assert any(message.span_ends)
        for value, ends, one in zip(group.credit.tolist(), message.span_ends, sampled, strict=True):
            assert math.isfinite(value) if ends and one else (value, ends) == (0, 0)
    assert (group.teacher_logprobs is None) == (not message.teacher_logprobs)
    if group.teacher_logprobs is not None:
        assert group.teacher_logprobs.tobytes() == message.teacher_logprobs
        for value, one in zip(group.teacher_logprobs.tolist(), sampled, strict=True):
            assert -math.inf < value <= 1.001e-3 if one else value == 0
    assert (group.teacher_top_ids is None) == (group.teacher_top_logprobs is None) == (not message.teacher_top_ids)
    if group.teacher_top_ids is not None and group.teacher_top_logprobs is not None:
        top = (message.teacher_top_ids, message.teacher_top_logprobs)
        assert (group.teacher_top_ids.tobytes(), group.teacher_top_logprobs.tobytes()) == top
        assert group.teacher_logprobs is not None
        places = zip(group.completion_ids.tolist(), group.teacher_logprobs.tolist(), sampled, strict=True)
        pairs = zip(group.teacher_top_ids.tolist(), group.teacher_top_logprobs.tolist(), strict=True)
        for (token, logprob, one), (ids, logprobs) in zip(places, pairs, strict=True):
            known = [number for number in ids if number != -1]
            assert len(set(known)) == len(known) <= len(ids) * one
            assert all(0 <= number < shape.vocab_size for number in known)
            assert all(value == 0 for number, value in zip(ids, logprobs, strict=True) if number == -1)
            chances = [math.exp(value) for number, value in zip(ids, logprobs, strict=True) if number != -1]
            assert sum(chances) + (math.exp(logprob) if one and token not in known else 0) <= 1.002
    assert group.truncated.tolist() == [bool(byte) for byte in message.truncated]
    assert (group.lease_id, group.policy_version) == (message.lease_id, message.policy_version)


def parse(shape: GroupShape, message: Group) -> RolloutGroup | InvalidGroupError:
    try:
        group = shape.parse(message)
    except InvalidGroupError as error:
        return error
    check(shape, group, message)
    return group


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_nearly_valid_message_is_refused_or_becomes_a_consistent_group(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    outcome = parse(shape, data.draw(nearly_valid(shape)))
    event("refused" if isinstance(outcome, InvalidGroupError) else "accepted")


WIDE = GroupShape(num_generations=4, num_rewards=1, max_completion_length=2**31 - 1, vocab_size=2**31)


@pytest.mark.parametrize(
    "lengths",
    [
        [2**31 - 1, 2**31 - 1, 1, 1],  # 2**32 in all: 0 in 32 bits
        [2**30] * 4,  # 2**32 as well
        [2**31 - 1, 2**31 - 1, 2, 4],  # 4 in 32 bits, as many as there are
        [2**31 - 1, 2, 1, 1],
    ],
)
def test_a_sum_of_lengths_beyond_32_bits_does_not_wrap(lengths: list[int]) -> None:
    rest: dict[str, Any] = {"rewards": bytes(16), "truncated": bytes(4)}
    outcome = parse(WIDE, group_message(completion_lengths=ints(lengths), **rest))
    assert isinstance(outcome, InvalidGroupError)
    assert str(outcome) == f"logprobs has 16 bytes, expected {sum(lengths)} x 4"


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001])
def test_every_kind_of_nan_means_missing(bits: int) -> None:
    nan = bits.to_bytes(4, "little")
    outcome = parse(SHAPE, group_message(logprobs=nan * 4, rewards=nan * 2))
    assert isinstance(outcome, RolloutGroup)
    assert np.isnan(outcome.logprobs).all()
    assert np.isnan(outcome.rewards).all()
