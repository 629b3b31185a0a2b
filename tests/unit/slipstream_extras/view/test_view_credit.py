"""Advantages of tokens and rewards of turns on a group's page, with numbers worked by hand."""

import numpy as np
import pytest

from replay.advantages import EPSILON
from replay.credit import CreditRecipe
from replay.groups import RolloutGroup
from slipstream_extras.view.pages.credit import Credit
from slipstream_extras.view.pages.group import Span, spans, turns
from tests.unit.consumer.builders import rollout_group

SCALE = 1 + EPSILON
RECIPE = CreditRecipe("per_turn", gamma=0.5, outcome_weight=0.5)


def episodes(rewards: dict[int, float]) -> RolloutGroup:
    """Turns 0-1, 4-5 and (in a second record) 7; and of the other episode 8-9."""
    return rollout_group(
        [[11, 12, 13, 14, 15, 16], [17, 18], [19, 20]],
        sampled=[[True, True, False, False, True, True], [False, True], [True, True]],
        episodes=[0, 0, 1],
        rewards=[1.0, 1.0],
        credit=rewards,
    )


# Mean 1, deviations 1, -1 and 0, sample variance 1. The second turn of the first episode has no reward of its own.
GROUP = episodes({1: 2.0, 7: 0.0, 9: 1.0})


def test_tokens_and_turns_have_the_numbers_of_the_trainer() -> None:
    credit = Credit.of(GROUP, RECIPE, (0.5, -2.0))
    first, third = 0.25 + 0.5 / SCALE, 0.25 - 1 / SCALE  # 1 - 0.5 · 1 and -1, beside half of the completion's
    np.testing.assert_allclose(credit.advantages, [first, first, 0, 0, third, third, 0, third, -1, -1], rtol=1e-12)
    assert (credit.unit, credit.is_whole) == ("turn", True)
    assert credit.rewarded[0] == [
        pytest.approx((1, 2.0, 0.5 / SCALE, first)),
        pytest.approx((3, 0.0, -1 / SCALE, third)),
    ]
    assert credit.rewarded[1] == [pytest.approx((1, 1.0, 0.0, -1.0))]


def test_spans_are_counted_within_their_completion() -> None:
    credit = Credit.of(episodes({0: 1.0, 1: 1.0, 4: 1.0, 8: 1.0}), CreditRecipe("per_step"), None)
    assert [[one.number for one in each] for each in credit.rewarded] == [[1, 2, 3], [1]]


@pytest.mark.parametrize("of_outcome", [None, (0.5, -2.0, 1.0)])
def test_advantages_of_completions_that_are_not_recorded_are_0_and_said_to_be(
    of_outcome: tuple[float, ...] | None,
) -> None:
    credit = Credit.of(GROUP, RECIPE, of_outcome)
    assert not credit.is_whole
    assert credit.rewarded[0][0].advantage == pytest.approx(0.5 / SCALE)
    assert Credit.of(GROUP, CreditRecipe("per_turn", outcome_weight=0.0), of_outcome).is_whole


def kinds(of_outcome: tuple[float, float]) -> list[str]:
    found = spans(GROUP, slice(0, 10), list("abcdefghij"), "advantage", Credit.of(GROUP, RECIPE, of_outcome))
    return [span.kind for span in found]


def test_tokens_have_the_colour_of_their_advantage() -> None:
    assert kinds((0.0, 0.0)) == ["p1", "p1", "masked", "masked", "n2", "n2", "masked", "n2", "a0", "a0"]  # 0.5, -1, 0
    assert kinds((4.0, -4.0)) == ["p3", "p3", "masked", "masked", "p2", "p2", "masked", "p2", "n3", "n3"]  # 2.5, 1, -2
    assert kinds((1.5, -0.5)) == ["p2", "p2", "masked", "masked", "n1", "n1", "masked", "n1", "n1", "n1"]  # 1.25, -0.25


def test_a_reward_stands_where_it_was_given_for() -> None:
    found = spans(GROUP, slice(0, 10), list("abcdefghij"), "logprob", Credit.of(GROUP, RECIPE, (0.5, -2.0)))
    assert [span.reward for span in found] == ["", "+2", "", "", "", "", "", "+0", "", "+1"]
    assert "advantage -1.0000" in found[9].title
    assert "advantage" not in found[2].title, "it was not sampled"


@pytest.mark.parametrize("pieces", [["5", "<|im_end|>"], ["5<|im_end|>"]])
def test_a_reward_stays_where_its_mark_is_left_out(pieces: list[str]) -> None:
    rewarded = [*map(Span, pieces[:-1]), Span(pieces[-1], reward="+0.5")]
    found = turns([*rewarded, *map(Span, ["\n", "<|im_start|>", "user", "\n", "Again."])], "assistant")
    said = [(turn.role, "".join(span.text for span in turn.spans)) for turn in found]
    assert said == [("assistant", "5"), ("user", "Again.")]
    assert [[span.reward for span in turn.spans if span.reward] for turn in found] == [["+0.5"], []]
