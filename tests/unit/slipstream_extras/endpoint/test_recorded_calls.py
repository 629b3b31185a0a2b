"""What was sampled is found where it was sampled, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_extras.endpoint.atropos.recorded import RecordedCalls
from slipstream_extras.endpoint.openai import Sampled


def sampled(prompt_ids: list[int], token_ids: list[int], version: int = 3, reason: str = "stop") -> Sampled:
    logprobs = [-token / 100 for token in token_ids]
    return Sampled(prompt_ids, token_ids, logprobs, [version] * len(token_ids), reason)


def found(calls: RecordedCalls, token_ids: list[int], taken=()) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in calls.find(np.array(token_ids, "<i4"), set(taken))]


def test_of_several_answers_the_longest_in_common_and_then_the_newest():
    calls = RecordedCalls()
    for version, tokens in enumerate(([7, 8, 9], [7, 8], [7, 8, 9], [6])):
        calls.note(sampled([1], tokens, version))
    (span,) = calls.find(np.array([1, 7, 8, 9, 4], "<i4"), set())
    assert (span.start, span.end, span.call.versions.tolist()) == (1, 4, [2, 2, 2])
    (other,) = calls.find(np.array([1, 7, 8, 9, 4], "<i4"), {span.call})
    assert other.call.versions.tolist() == [0, 0, 0]
    calls.remove([span.call, other.call])
    assert found(calls, [1, 7, 8, 9, 4]) == [(1, 3)]


def test_one_that_goes_on_is_left_to_a_sequence_that_does():
    calls = RecordedCalls()
    for tokens in ([7, 8, 0], [7, 8, 9, 0]):  # the environment drops the 0
        calls.note(sampled([1], tokens))
    (span,) = calls.find(np.array([1, 7, 8], "<i4"), set())
    assert span.call.token_ids.tolist() == [7, 8, 0]
    assert found(calls, [1, 7, 8, 9], {span.call}) == [(1, 4)]


def test_an_answer_that_the_environment_cuts_is_found_up_to_there_and_one_that_goes_on_from_its_middle_follows():
    calls = RecordedCalls()
    calls.note(sampled([1], [7, 8, 9]))
    assert found(calls, [1, 7, 8, 5]) == [(1, 3)]
    calls.note(sampled([1, 7], [8, 6]))
    assert found(calls, [1, 7, 8, 6]) == [(1, 2), (2, 4)]


def test_bytes_and_time_are_bounded_and_the_oldest_goes_first():
    now = [0.0]
    calls = RecordedCalls(max_bytes=4000, keep_s=10.0, clock=lambda: now[0])
    for prompt in range(5):
        calls.note(sampled([prompt], [7]))
    assert (len(calls), calls.evicted) == (3, 2)
    assert calls.num_bytes <= 4000
    assert found(calls, [1, 7]) == []
    assert found(calls, [2, 7]) == [(1, 2)]
    now[0] = 10.5
    assert found(calls, [4, 7]) == []
    assert (len(calls), calls.num_bytes, calls.evicted) == (0, 0, 2)
    calls.note(sampled([1], []))
    assert len(calls) == 0
    calls.note(sampled([1], [2]))
    calls.forget()
    assert (len(calls), calls.num_bytes) == (0, 0)


TOKENS = st.lists(st.integers(0, 2), max_size=6)


def agreement(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return next((place for place in range(len(one)) if one[place : place + 1] != other[place : place + 1]), len(one))


@pytest.mark.long
@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=12), TOKENS)
def test_what_is_found_is_what_was_sampled_there(recorded, sequence):
    """Against the definition: the sequence begins with a prompt, and goes on as far as the best answer to it does."""
    calls = RecordedCalls()
    for prompt, answer in recorded:
        calls.note(sampled(prompt, answer))
    reach: dict[int, int] = {}
    for prompt, answer in recorded:
        start = len(prompt)
        if prompt and sequence[:start] == prompt and (count := agreement(answer, sequence[start:])):
            reach[start] = max(reach.get(start, 0), start + count)
    spans = calls.find(np.array(sequence, "<i4"), set())
    starts = sorted(reach)
    ends = [min(reach[start], *starts[place + 1 : place + 2] or [reach[start]]) for place, start in enumerate(starts)]
    assert [(span.start, span.end) for span in spans] == list(zip(starts, ends, strict=True))
    for span in spans:
        assert np.frombuffer(span.call.prompt, "<i4").tolist() == sequence[: span.start]
        assert span.call.token_ids[: span.end - span.start].tolist() == sequence[span.start : span.end]
