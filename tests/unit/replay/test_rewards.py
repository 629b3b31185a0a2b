"""The signal of a group and the soft overlong punishment, against numbers worked by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from protocol.config.run import RunConfig
from replay.advantages import EPSILON
from replay.groups import RolloutGroup
from replay.rewards import OverlongPenalty, RewardRecipe

NAN = math.nan


def scored(rewards: list[list[float]], lengths: list[int] | None = None) -> RolloutGroup:
    """A group of which only rewards and lengths matter."""
    values = np.array(rewards, np.float32)
    completion_lengths = np.array(lengths or [1] * len(values), np.int32)
    tokens = np.zeros(int(completion_lengths.sum()), np.int32)
    return RolloutGroup(
        lease_id="s-1",
        policy_version=0,
        prompt_ids=np.array([1], np.int32),
        completion_lengths=completion_lengths,
        completion_ids=tokens,
        logprobs=tokens.astype(np.float32),
        rewards=values,
        truncated=np.zeros(len(values), np.bool_),
    )


def recipe(*weights: float, aggregation: str = "sum_then_normalize", overlong: OverlongPenalty | None = None):
    return RewardRecipe(np.array(weights, np.float32), aggregation, overlong)


# Signal.


@pytest.mark.parametrize(
    ("rewards", "weights", "expected"),
    [
        ([[0.0], [0.0], [0.0]], [1.0], 0.0),
        ([[0.0], [0.0], [3.0]], [1.0], 4.0),  # mean 1: 1 + 1 + 2
        ([[0.0], [1.0], [0.0], [1.0]], [2.0], 4.0),
        ([[0.0], [3.0]], [-1.0], 3.0),
        ([[0.1 + 0.2], [0.3]], [1.0], 0.0),  # float noise is no signal
        ([[1000.0], [1001.0]], [1.0], 1.0),
        ([[1000.0], [1000.005]], [1.0], 0.0),
        ([[NAN], [NAN]], [1.0], 0.0),
        ([[NAN], [1.0]], [1.0], 0.0),
        ([[NAN], [1.0], [2.0]], [1.0], 1.0),
        ([[1.0, NAN], [NAN, 3.0], [NAN, NAN]], [1.0, 1.0], 2.0),  # R = 1, 3
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], 0.0),  # they cancel out in the sum
        ([[1.0, 0.0], [1.0, 1.0]], [1.0, 0.0], 0.0),  # weight 0: only observed
    ],
)
def test_signal_of_the_sum(rewards: list[list[float]], weights: list[float], expected: float) -> None:
    assert recipe(*weights).signal(scored(rewards)) == pytest.approx(expected, abs=0.0 if expected == 0 else 1e-6)


def test_signal_is_the_advantages_times_the_deviation_of_the_reward() -> None:
    rewards = np.array([0.0, 0.5, 2.0, 7.0])
    std = rewards.std(ddof=1)
    advantages = (rewards - rewards.mean()) / (std + EPSILON)
    expected = np.abs(advantages).sum() * (std + EPSILON)
    assert recipe(1.0).signal(scored(rewards[:, None].tolist())) == pytest.approx(expected, rel=1e-6)


SQRT2 = math.sqrt(2)


@pytest.mark.parametrize(
    ("rewards", "weights", "expected"),
    [
        ([[0.0, 5.0], [0.0, 5.0]], [1.0, 1.0], 0.0),
        ([[0.0, 5.0], [1.0, 5.0]], [3.0, 1.0], 2 * 3 * 0.5 / (1 / SQRT2 + EPSILON)),
        ([[0.0, 0.1 + 0.2], [1.0, 0.3]], [3.0, 1.0], 2 * 3 * 0.5 / (1 / SQRT2 + EPSILON)),  # noise is not blown up
        ([[0.0, 5.0], [1.0, 5.0]], [0.0, 1.0], 0.0),
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], 0.0),  # they cancel out
        ([[0.1, 0.3], [0.2, 0.2], [0.3, 0.1]], [1.0, 1.0], 0.0),  # but for float noise
        ([[1.0, 0.0], [0.0, 1.0]], [3.0, 1.0], 2 * 2 * 0.5 / (1 / SQRT2 + EPSILON)),
        ([[NAN, 5.0], [1.0, 5.0]], [1.0, 1.0], 0.0),  # one value has no deviation
        ([[NAN, 5.0], [1.0, 7.0], [NAN, NAN]], [1.0, 1.0], 2 * 1 / (SQRT2 + EPSILON)),
        ([[NAN, NAN], [NAN, NAN]], [1.0, 1.0], 0.0),
    ],
)
def test_signal_of_functions_that_are_normalized_first(
    rewards: list[list[float]], weights: list[float], expected: float
) -> None:
    value = recipe(*weights, aggregation="normalize_then_sum").signal(scored(rewards))
    assert value == pytest.approx(expected, abs=0.0 if expected == 0 else 1e-6)


# Overlong completions. L_max 10, L_cache 4: -0.25 for every token above 6.

OVERLONG = OverlongPenalty(buffer_tokens=4, penalty=2.0, max_completion_length=10)


def test_the_punishment_grows_over_the_last_tokens() -> None:
    lengths = np.array([1, 6, 7, 8, 10], np.int32)
    assert OVERLONG.punishment(lengths).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert OVERLONG.punishment(lengths).dtype == np.float32
    whole = OverlongPenalty(buffer_tokens=10, penalty=1.0, max_completion_length=10)
    assert whole.punishment(np.array([1, 5, 10], np.int32)).tolist() == pytest.approx([-0.1, -0.5, -1.0])


def test_the_punishment_is_one_more_column_weighted_by_the_penalty() -> None:
    subject = recipe(1.0, 0.5, overlong=OVERLONG)
    columns = subject.columns(scored([[1.0, NAN], [NAN, NAN], [NAN, 3.0]], [8, 10, 6]))
    np.testing.assert_array_equal(columns, [[1.0, NAN, -0.5], [NAN, NAN, NAN], [NAN, 3.0, 0.0]])
    assert columns.dtype == subject.column_weights.dtype == np.float32
    assert subject.column_weights.tolist() == [1.0, 0.5, 2.0]


def test_without_punishment_the_columns_are_the_rewards() -> None:
    group = scored([[1.0], [2.0]])
    assert recipe(1.0).columns(group) is group.rewards
    assert recipe(1.0).column_weights.tolist() == [1.0]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_length_alone_is_signal_where_it_is_punished(aggregation: str) -> None:
    group = scored([[1.0], [1.0]], [3, 10])
    assert recipe(1.0, aggregation=aggregation).signal(group) == 0.0
    assert recipe(1.0, aggregation=aggregation, overlong=OVERLONG).signal(group) > 0.0


def test_the_punishment_counts_in_the_signal() -> None:
    # R = 1, 2 - 2 * 0.5 = 1: all that the longer one gained is taken from it again
    assert recipe(1.0, overlong=OVERLONG).signal(scored([[1.0], [2.0]], [3, 8])) == 0.0


# Mean reward, and where a recipe comes from.


def test_mean_reward_is_over_the_scored_and_without_punishment() -> None:
    subject = recipe(1.0, 0.5, overlong=OVERLONG)
    group = scored([[1.0, NAN], [NAN, NAN], [2.0, 6.0]], [10, 10, 10])
    assert subject.mean_reward(group) == 3.0  # (1 + 2 + 0.5 * 6) / 2
    assert math.isnan(subject.mean_reward(scored([[NAN, NAN]])))


@pytest.mark.parametrize(("tokens", "expected"), [(0, None), (4, OverlongPenalty(4, 0.5, 256))])
def test_the_recipe_of_a_run(tmp_path: Path, tokens: int, expected: OverlongPenalty | None) -> None:
    config = RunConfig.model_validate(
        {
            "run_dir": str(tmp_path),
            "model": {"path": "model"},
            "dataset": {"path": "data.jsonl"},
            "rewards": {"functions": [{"function": "r:a"}, {"function": "r:b", "weight": 0.25}]},
            "advantage": {"overlong_buffer_tokens": tokens, "overlong_penalty": 0.5},
        }
    )
    result = RewardRecipe.of(config, "normalize_then_sum", "group")
    assert result.weights.tolist() == [1.0, 0.25]
    assert (result.aggregation, result.overlong) == ("normalize_then_sum", expected)
