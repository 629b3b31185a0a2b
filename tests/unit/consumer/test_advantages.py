"""Advantages against numbers worked by hand and against TRL's own code on the same rewards."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumer.advantages import EPSILON, advantages, combined_rewards, has_signal, nanstd
from consumer.trainer import GRPOTrainer

from .builders import rollout_group, run_config
from .trl_reference import trl_inputs, trl_trainer

NAN = math.nan
ONE = torch.tensor([1.0])


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-6)


# By hand.


def test_one_group_is_centred_and_divided_by_its_sample_deviation() -> None:
    # mean 0.5; deviations -0.5, 0.5, -0.5, 0.5; variance 4 * 0.25 / 3 = 1/3
    scale = math.sqrt(1 / 3) + EPSILON
    close(advantages(column(0, 1, 0, 1), ONE, 4), [-0.5 / scale, 0.5 / scale, -0.5 / scale, 0.5 / scale])


def test_every_group_has_its_own_mean_and_deviation() -> None:
    # (1, 3): mean 2, deviation sqrt(2); (10, 20): mean 15, deviation sqrt(50)
    a, b = 1 / (math.sqrt(2) + EPSILON), 5 / (math.sqrt(50) + EPSILON)
    close(advantages(column(1, 3, 10, 20), ONE, 2), [-a, a, -b, b])


def test_the_deviation_of_the_batch() -> None:
    # all of (1, 3, 10, 20): mean 8.5, squares 56.25 + 30.25 + 2.25 + 132.25 = 221, / 3
    scale = math.sqrt(221 / 3) + EPSILON
    close(advantages(column(1, 3, 10, 20), ONE, 2, scale_rewards="batch"), [x / scale for x in (-1, 1, -5, 5)])


def test_no_scaling() -> None:
    close(advantages(column(1, 3, 10, 20), ONE, 2, scale_rewards="none"), [-1, 1, -5, 5])


def test_functions_are_weighted_and_summed_first() -> None:
    rewards = torch.tensor([[1.0, 10.0], [0.0, 30.0]])
    weights = torch.tensor([2.0, 0.1])
    close(combined_rewards(rewards, weights), [3.0, 3.0])
    close(advantages(rewards, weights, 2), [0.0, 0.0])


def test_functions_are_normalized_first() -> None:
    # Each function gives -s, s or s, -s with s = x / (x sqrt(2) + eps); the weights 3 and 1 leave -2s, 2s, and over the
    # batch of two the deviation of that is 2s sqrt(2).
    rewards = torch.tensor([[1.0, 100.0], [3.0, 50.0]])
    weights = torch.tensor([3.0, 1.0])
    first, second = 1 / (math.sqrt(2) + EPSILON), 25 / (25 * math.sqrt(2) + EPSILON)
    value = 3 * first - second
    expected = value / (value * math.sqrt(2) + EPSILON)
    close(advantages(rewards, weights, 2, aggregation="normalize_then_sum"), [-expected, expected])


def test_a_missing_reward_is_left_out_and_a_completion_without_any_has_advantage_zero() -> None:
    # (1, 3) remain: mean 2, deviation sqrt(2)
    a = 1 / (math.sqrt(2) + EPSILON)
    close(advantages(column(1, NAN, 3, NAN), ONE, 4), [-a, 0.0, a, 0.0])
    two = torch.tensor([[1.0, NAN], [NAN, NAN], [NAN, 3.0], [NAN, NAN]])
    close(advantages(two, torch.tensor([1.0, 1.0]), 4), [-a, 0.0, a, 0.0])


def test_groups_without_any_or_with_one_reward_give_no_advantage() -> None:
    close(advantages(column(NAN, NAN, 1, 3), ONE, 2, scale_rewards="none"), [0.0, 0.0, -1.0, 1.0])
    close(advantages(column(5, NAN), ONE, 2), [0.0, 0.0])


def test_nanstd_by_hand() -> None:
    close(nanstd(torch.tensor([1.0, NAN, 3.0, 5.0]), 0), [2.0])


# TRL's own code.

CASES = {
    "plain": [[0.0], [1.0], [0.5], [0.25], [3.0], [3.0], [3.0], [4.0]],
    "two functions": [[0.0, 5.0], [1.0, 4.0], [0.5, 3.0], [0.2, 2.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 9.0]],
    "missing": [[0.0, NAN], [1.0, 2.0], [NAN, NAN], [0.2, 2.0], [NAN, 1.0], [NAN, 0.5], [0.3, NAN], [0.0, 9.0]],
    "a group without any": [[NAN, NAN]] * 4 + [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.5, 1.0]],
    "a group that is equal": [[1.0, 2.0]] * 4 + [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.5, 1.0]],
    "one function gave none": [[float(i), NAN] for i in range(8)],
}


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, GRPOTrainer]:
    """A TRL trainer for one and for two reward functions of unlike weights."""
    functions = [{"function": "r:first", "weight": 1.5}, {"function": "r:second", "weight": -0.5}]
    folder = tmp_path_factory.mktemp("run")
    return {
        count: trl_trainer(run_config(folder, tiny_model, rewards={"functions": functions[:count]}), tiny_model)
        for count in (1, 2)
    }


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_trl(reference: dict[int, GRPOTrainer], case: str, scale_rewards: str, aggregation: str) -> None:
    rewards = torch.tensor(CASES[case])
    trainer = reference[rewards.shape[1]]
    trainer.scale_rewards, trainer.multi_objective_aggregation = scale_rewards, aggregation
    groups = [rollout_group([[3], [4], [5], [6]], rewards=rewards[i : i + 4].tolist()) for i in (0, 4)]
    expected = trl_inputs(trainer, groups)["advantages"]
    actual = advantages(rewards, trainer.reward_weights, 4, scale_rewards=scale_rewards, aggregation=aggregation)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    assert expected.isfinite().all()


# Signal.


@pytest.mark.parametrize(
    ("rewards", "weights", "aggregation", "expected"),
    [
        ([[0.0], [0.0], [0.0]], [1.0], "sum_then_normalize", False),
        ([[0.0], [0.0], [0.1]], [1.0], "sum_then_normalize", True),
        ([[0.1 + 0.2], [0.3]], [1.0], "sum_then_normalize", False),  # float noise is no signal
        ([[1000.0], [1001.0]], [1.0], "sum_then_normalize", True),
        ([[NAN], [NAN]], [1.0], "sum_then_normalize", False),
        ([[NAN], [1.0]], [1.0], "sum_then_normalize", False),
        ([[NAN], [1.0], [2.0]], [1.0], "sum_then_normalize", True),
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], "sum_then_normalize", False),  # they cancel out in the sum ...
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], "normalize_then_sum", True),  # ... but each differs
        ([[1.0, 0.0], [1.0, 1.0]], [1.0, 0.0], "sum_then_normalize", False),  # weight 0: only observed
        ([[1.0, 0.0], [1.0, 1.0]], [1.0, 0.0], "normalize_then_sum", False),
    ],
)
def test_signal(rewards: list[list[float]], weights: list[float], aggregation: str, expected: bool) -> None:
    assert has_signal(torch.tensor(rewards), torch.tensor(weights), aggregation=aggregation) is expected


reward_values = st.one_of(st.just(NAN), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 7.0]))


@given(st.lists(reward_values, min_size=2, max_size=6), st.sampled_from(["group", "batch", "none"]))
def test_a_group_has_signal_exactly_if_an_advantage_is_not_zero(values: list[float], scale_rewards: str) -> None:
    rewards = column(*values)
    given_advantages = advantages(rewards, ONE, len(values), scale_rewards=scale_rewards)
    assert has_signal(rewards, ONE) == bool((given_advantages.abs() > 1e-3).any())
