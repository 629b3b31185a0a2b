"""The advantages of tokens by the rewards of spans, against numbers worked by hand and against plain loops, in float64."""

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.advantages import EPSILON
from replay.credit import CreditRecipe, Spans
from replay.groups import RolloutGroup
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config

ZEROS = np.zeros(2)


def steps(**options: Any) -> CreditRecipe:
    return CreditRecipe("per_step", **options)


def turns(**options: Any) -> CreditRecipe:
    return CreditRecipe("per_turn", **options)


def two_completions(credit: dict[int, float] | None) -> RolloutGroup:
    """Of tokens 0 to 4 and 5 to 7."""
    return rollout_group([[11, 12, 13, 14, 15], [16, 17, 18]], rewards=[1.0, 1.0], credit=credit)


def two_episodes(credit: dict[int, float], rewards: Any = (1.0, 1.0)) -> RolloutGroup:
    """Turns 0-1, 4-5 and (in a second record, behind 6) 7; and of the other episode 8-9."""
    return rollout_group(
        [[11, 12, 13, 14, 15, 16], [17, 18], [19, 20]],
        sampled=[[True, True, False, False, True, True], [False, True], [True, True]],
        episodes=[0, 0, 1],
        rewards=list(rewards),
        credit=credit,
    )


def test_a_token_has_the_normalised_rewards_from_its_span_on() -> None:
    # Rewards 1 and 4 at tokens 1 and 3, and 1 at token 6: mean 2, deviations -1, 2, -1, variance 6 / 2.
    scale = math.sqrt(3) + EPSILON
    found = steps().advantages(two_completions({1: 1.0, 3: 4.0, 6: 1.0}), ZEROS)
    expected = np.array([1, 1, 2, 2, 0, -1, -1, 0]) / scale  # -1 + 2; tokens 4 and 7 are behind the last span
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_gamma_discounts_the_next_span() -> None:
    # Rewards 0, 0, 3 of one completion and 1 of the other: mean 1, deviations -1, -1, 2, 0, variance 6 / 3.
    group, scale = two_completions({0: 0.0, 2: 0.0, 4: 3.0, 7: 1.0}), math.sqrt(2) + EPSILON
    found = steps(gamma=0.5).advantages(group, ZEROS)  # -1 + 0.5 (-1 + 0.5 · 2), -1 + 0.5 · 2, 2
    np.testing.assert_allclose(found, np.array([-1, 0, 0, 2, 2, 0, 0, 0]) / scale, atol=1e-12)
    found = steps(gamma=0.0).advantages(group, ZEROS)
    np.testing.assert_allclose(found, np.array([-1, -1, -1, 2, 2, 0, 0, 0]) / scale, atol=1e-12)


def test_the_outcome_is_added_with_its_weight_to_all_sampled_tokens() -> None:
    of_outcome = np.array([0.5, -2.0])
    group = two_episodes({1: 2.0, 9: 1.0})  # deviations 0.5 and -0.5, variance 0.5
    half = 0.5 / (math.sqrt(0.5) + EPSILON)
    found = turns(outcome_weight=0.25).advantages(group, of_outcome)
    expected = [0.125 + half, 0.125 + half, 0, 0, 0.125, 0.125, 0, 0.125, -0.5 - half, -0.5 - half]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    plain = steps(outcome_weight=0.25).advantages(two_completions(None), of_outcome)
    assert plain.tolist() == [0.125] * 5 + [-0.5] * 3, "without rewards of spans there is nothing else"


def test_per_turn_the_spans_of_a_turn_are_one() -> None:
    group = two_episodes({0: 1.0, 1: 2.0, 4: 5.0, 7: 0.0, 9: -1.0})
    per_step, per_turn = Spans.of(group), Spans.of(group, per_turn=True)
    assert (per_step.ends.tolist(), per_step.rewards.tolist()) == ([0, 1, 4, 7, 9], [1, 2, 5, 0, -1])
    assert per_turn.ends.tolist() == [1, 5, 7, 9], "the last token of each turn"
    assert per_turn.rewards.tolist() == [3, 5, 0, -1]
    assert per_turn.completions.tolist() == [0, 0, 0, 1], "both records are of one episode"


def test_a_turn_without_a_reward_belongs_to_the_next_one() -> None:
    found = turns().advantages(two_episodes({5: 1.0, 9: 0.0}), ZEROS)
    half = 0.5 / (math.sqrt(0.5) + EPSILON)
    np.testing.assert_allclose(found, [half, half, 0, 0, half, half, 0, 0, -half, -half], rtol=1e-12)


@pytest.mark.parametrize("credit", [{1: 2.0}, {1: 0.3, 7: 0.1 + 0.2}, {1: 0.0, 3: 0.0, 7: 0.0}])
def test_rewards_of_spans_that_are_equal_add_nothing(credit: dict[int, float]) -> None:
    assert not steps().advantages(two_completions(credit), ZEROS).any()


# Signal.


def recipe(credit: CreditRecipe | None) -> RewardRecipe:
    return RewardRecipe(np.ones(1, np.float32), credit=credit)


def test_a_group_whose_turns_differ_has_signal_although_its_outcomes_do_not() -> None:
    group = two_episodes({1: 2.0, 9: 1.0})
    assert recipe(None).signal(group) == 0.0
    assert recipe(turns()).signal(group) == 1.0  # |2 - 1.5| + |1 - 1.5|
    assert recipe(steps()).signal(two_episodes({1: 1.0, 9: 1.0})) == 0.0
    within = two_episodes({0: 1.0, 1: 2.0, 9: 3.0})  # two spans of one turn make it worth 3
    assert (recipe(turns()).signal(within), recipe(steps()).signal(within)) == (0.0, 2.0)


def test_the_signal_of_outcomes_counts_with_its_weight() -> None:
    group = rollout_group([[11], [12]], rewards=[0.0, 3.0])
    assert recipe(None).signal(group) == 3.0
    assert recipe(steps(outcome_weight=0.5)).signal(group) == 1.5
    assert recipe(steps(outcome_weight=0.0)).signal(group) == 0.0


def test_given_rewards_are_the_advantages_of_their_spans() -> None:
    group, given_ones = two_completions({1: 1.0, 3: -4.0, 6: 0.5}), CreditRecipe("given")
    found = given_ones.advantages(group, np.array([3.0, -3.0]))
    assert found.tolist() == [1, 1, -4, -4, 0, 0.5, 0.5, 0], "neither later spans, nor the outcome, nor the mean counts"
    assert recipe(given_ones).signal(group) == 5.5
    assert recipe(given_ones).signal(two_completions({1: 0.0, 6: 0.0})) == 0.0
    assert recipe(given_ones).signal(two_completions({1: 0.5, 6: 0.5})) == 1.0, "equal ones count"
    shown = two_episodes({1: 2.0, 9: -1.0})
    assert given_ones.advantages(shown, ZEROS).tolist() == [2, 2, 0, 0, 0, 0, 0, 0, -1, -1]


def test_a_group_without_given_rewards_is_credited_with_its_outcomes() -> None:
    group, given_ones = rollout_group([[11], [12]], rewards=[0.0, 3.0]), CreditRecipe("given")
    assert given_ones.advantages(group, np.array([-1.0, 1.0])).tolist() == [-1.0, 1.0]
    assert recipe(given_ones).signal(group) == 3.0


# Against plain loops.


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    episodes = sorted([0, 1, *draw(st.lists(st.integers(0, 1), max_size=2))])
    completions = [[11] * draw(st.integers(1, 6)) for _ in episodes]
    sampled = [
        [True, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))] for ids in completions
    ]
    [places] = np.nonzero(np.concatenate(sampled))
    ends = draw(st.lists(st.sampled_from(places.tolist()), min_size=1, unique=True))
    credit = {end: draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])) for end in ends}
    return rollout_group(completions, sampled=sampled, episodes=episodes, rewards=[0.0, 1.0], credit=credit)


def by_loops(group: RolloutGroup, unit: str, gamma: float, weight: float, outcome: list[float]) -> list[float]:
    """The advantages of tokens, token by token."""
    rewarded = group.span_rewards(slice(0, group.num_tokens))
    place, tokens = 0, list[tuple[int, tuple[int, int], bool]]()  # completion, turn, sampled
    for record, length in enumerate(group.completion_lengths.tolist()):
        turn, before = 0, False
        for _ in range(length):
            now = bool(group.is_sampled[place])
            turn += now and not before
            tokens.append((int(group.completion_of[record]), (record, turn), now))
            before, place = now, place + 1
    spans = dict[Any, list[Any]]()  # completion, last token, reward
    for token, (completion, turn_of_it, _) in enumerate(tokens):
        if token in rewarded:
            last = max(t for t, each in enumerate(tokens) if each[1] == turn_of_it and each[2])
            key, end = (turn_of_it, last) if unit == "per_turn" else (token, token)
            spans.setdefault(key, [completion, end, 0.0])[2] += rewarded[token]
    values = [reward for *_, reward in spans.values()]
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else 0.0
    found = []
    for token, (completion, _, sampled) in enumerate(tokens):
        later = [reward for owner, end, reward in spans.values() if owner == completion and end >= token]
        total = sum(gamma**k * (reward - mean) / (std + EPSILON) for k, reward in enumerate(later))
        found.append(weight * outcome[completion] + total if sampled else 0.0)
    return found


@given(groups(), st.sampled_from(["per_turn", "per_step"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_equal_to_plain_loops(group: RolloutGroup, unit: Literal["per_turn", "per_step"], gamma: float) -> None:
    found = CreditRecipe(unit, gamma, 0.5).advantages(group, np.array([1.0, -1.0]))
    np.testing.assert_allclose(found, by_loops(group, unit, gamma, 0.5, [1.0, -1.0]), rtol=1e-11, atol=1e-11)
    only_spans = CreditRecipe(unit, gamma, 0.0)
    assert (only_spans.signal(group, 1.0) > 0) == bool((np.abs(only_spans.advantages(group, ZEROS)) > 1e-9).any())


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_rewards_of_steps_that_credit_their_turns_are_in_no_outcome(tmp_path: Any, aggregation: str) -> None:
    server = {"factory": "openenv", "options": {"url": "http://127.0.0.1:8000"}}
    config = run_config(tmp_path, rewards={"credit": "per_turn"}, environment=server)
    found = RewardRecipe.of(config, aggregation, "group")
    group = two_episodes({1: 2.0, 9: 1.0}, rewards=[[3.0, 2.0], [3.0, 1.0]])
    assert found.columns(group) @ found.column_weights == pytest.approx([3.0, 3.0])
    assert found.signal(group) == 1.0, "of the turns alone: |2 - 1.5| + |1 - 1.5|"
    assert found.mean_reward(group) == 4.5, "what is reported counts them"


def test_the_recipe_is_the_configuration(tmp_path: Any) -> None:
    assert RewardRecipe.of(run_config(tmp_path), "sum_then_normalize", "group").credit is None
    options = {"credit": "per_turn", "gamma": 0.9, "outcome_weight": 0.5}
    found = RewardRecipe.of(run_config(tmp_path, rewards=options), "sum_then_normalize", "group").credit
    assert found == CreditRecipe("per_turn", 0.9, 0.5)
    for key in ("gamma", "outcome_weight"):
        for credit in ("outcome", "given"):
            with pytest.raises(ValueError, match=key):
                run_config(tmp_path, rewards={key: 0.5, "credit": credit})
