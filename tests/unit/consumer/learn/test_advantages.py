"""Advantages against numbers worked by hand and against TRL's own code on the same rewards, in float64."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoTokenizer

from protocol.runtime.processes import block_import
from replay.advantages import EPSILON, advantages, deviations
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import GRPOTrainer, slipstream_trainer, trl_inputs, trl_trainer

NAN = math.nan
ONE = np.ones(1)
TOLERANCE = 1e-12  # numbers around 1, of a few dozen operations

pytestmark = pytest.mark.usefixtures("float64")


def column(*values: float) -> NDArray[np.float64]:
    return np.array(values, np.float64)[:, None]


def close(actual: NDArray[np.float64], expected: Any) -> None:
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


# By hand.


def test_one_group_is_centred_and_divided_by_its_sample_deviation() -> None:
    # mean 0.5; deviations -0.5, 0.5, -0.5, 0.5; variance 4 * 0.25 / 3 = 1/3
    scale = math.sqrt(1 / 3) + EPSILON
    close(advantages(column(0, 1, 0, 1), ONE, 4), [-0.5 / scale, 0.5 / scale, -0.5 / scale, 0.5 / scale])


def test_a_missing_reward_is_left_out_and_a_completion_without_any_has_advantage_zero() -> None:
    # (1, 3) remain: mean 2, deviation sqrt(2)
    a = 1 / (math.sqrt(2) + EPSILON)
    close(advantages(column(1, NAN, 3, NAN), ONE, 4), [-a, 0.0, a, 0.0])
    two = np.array([[1.0, NAN], [NAN, NAN], [NAN, 3.0], [NAN, NAN]])
    close(advantages(two, np.ones(2), 4), [-a, 0.0, a, 0.0])


def test_groups_without_any_or_with_one_reward_give_no_advantage() -> None:
    close(advantages(column(NAN, NAN, 1, 3), ONE, 2, scale_rewards="none"), [0.0, 0.0, -1.0, 1.0])
    close(advantages(column(5, NAN), ONE, 2), [0.0, 0.0])
    for baseline in ("group", "none"):  # a single value in the batch has no deviation
        close(advantages(column(5, NAN), ONE, 2, scale_rewards="batch", baseline=baseline), [0.0, 0.0])


def test_without_a_baseline_rewards_are_advantages() -> None:
    options = {"scale_rewards": "none", "baseline": "none"}
    close(advantages(column(1, NAN, 0, -3), ONE, 1, **options), [1.0, 0.0, 0.0, -3.0])  # type: ignore[arg-type]
    both = np.array([[1.0, 2.0], [NAN, 4.0]])
    close(advantages(both, np.array([1.0, 0.5]), 2, **options), [2.0, 2.0])  # type: ignore[arg-type]


def test_groups_of_one_completion_without_a_baseline(tmp_path: Path, one_layer_model: Path) -> None:
    """The batch is REINFORCE's: a row of reward 0 has no gradient and is left out, and its tokens are counted."""
    config = run_config(
        tmp_path, one_layer_model, advantage={"baseline": "none"}, sampling={"num_generations": 1},
        trainer={"scale_rewards": "none"}, pipeline={"groups_per_step": 3},
    )  # fmt: skip
    recipe = slipstream_trainer(config, one_layer_model).recipe
    groups = [rollout_group([[11, 12]], rewards=[reward]) for reward in (1.0, 0.0, -2.0)]
    assert [recipe.rewards.signal(group) for group in groups] == [1, 0, 2]
    batches = recipe.tensors(groups)
    rows = {int(row): float(a) for batch in batches for row, a in zip(batch["row"], batch["advantages"], strict=True)}
    assert rows == {0: 1.0, 2: -2.0}
    assert batches[0]["num_items_in_batch"] == 6


def test_leaving_one_out_compares_with_the_mean_of_the_others() -> None:
    # 1 - (3 + 8) / 2, 3 - (1 + 8) / 2, 8 - (1 + 3) / 2
    close(advantages(column(1, 3, 8), ONE, 3, scale_rewards="none", baseline="leave_one_out"), [-4.5, -1.5, 6.0])
    # without the missing one: 1 - 3, 3 - 1; and where one alone is scored there are no others
    values = column(1, NAN, 3, NAN, 5, NAN)
    close(advantages(values, ONE, 3, scale_rewards="none", baseline="leave_one_out"), [-2, 0, 2, 0, 0, 0])


def test_leaving_one_out_is_divided_as_scale_rewards_says_by_the_deviation_of_the_rewards() -> None:
    # -2, 2 of (1, 3) and -10, 10 of (10, 20); deviations as above
    a, b = 2 / (math.sqrt(2) + EPSILON), 10 / (math.sqrt(50) + EPSILON)
    close(advantages(column(1, 3, 10, 20), ONE, 2, baseline="leave_one_out"), [-a, a, -b, b])
    scale = math.sqrt(221 / 3) + EPSILON
    by_batch = advantages(column(1, 3, 10, 20), ONE, 2, scale_rewards="batch", baseline="leave_one_out")
    close(by_batch, [x / scale for x in (-2, 2, -10, 10)])


def test_leaving_one_out_changes_nothing_where_every_function_is_normalized_and_scored_all() -> None:
    rewards = np.array([[1.0, 9.0], [3.0, 5.0], [3.5, 5.0], [1.0, 10.0], [2.0, 0.0], [7.0, 1.0]])
    weights = np.array([3.0, 1.0])
    group, others = (
        advantages(rewards, weights, 3, aggregation="normalize_then_sum", baseline=baseline)
        for baseline in ("group", "leave_one_out")
    )
    np.testing.assert_allclose(group, others, atol=1e-4, rtol=0)  # the epsilon weighs two thirds as much


def test_leaving_one_out_is_each_functions_own_where_functions_are_normalized() -> None:
    # The first function scored two of three: -2, 2 over sqrt(2); the second all of (0, 0, 3): -1.5, -1.5, 3 over sqrt(3).
    rewards = np.array([[1.0, 0.0], [3.0, 0.0], [NAN, 3.0]])
    first, second = 1 / (math.sqrt(2) + EPSILON), 1 / (math.sqrt(3) + EPSILON)
    total = np.array([-2 * first - 1.5 * second, 2 * first - 1.5 * second, 3 * second])
    expected = (total - total.mean()) / (total.std(ddof=1) + EPSILON)
    actual = advantages(
        rewards, np.ones(2), 3, aggregation="normalize_then_sum", baseline="leave_one_out", scale_rewards="none"
    )
    close(actual, expected)


# TRL's own code.

CASES = {  # every number is one of float32 too, in which rewards travel
    "plain": [[0.0], [1.0], [0.5], [0.25], [3.0], [3.0], [3.0], [4.0]],
    "two functions": [[0.0, 5.0], [1.0, 4.0], [0.5, 3.0], [0.25, 2.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 9.0]],
    "missing": [[0.0, NAN], [1.0, 2.0], [NAN, NAN], [0.25, 2.0], [NAN, 1.0], [NAN, 0.5], [0.375, NAN], [0.0, 9.0]],
    "a group without any": [[NAN, NAN]] * 4 + [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.5, 1.0]],
    "a group that is equal": [[1.0, 2.0]] * 4 + [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.5, 1.0]],
    "one function gave none": [[float(i), NAN] for i in range(8)],
}


@pytest.fixture(scope="module")
def reference(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, GRPOTrainer]:
    """A TRL trainer for one and for two reward functions of unlike weights."""
    functions = [{"function": "r:first", "weight": 1.5}, {"function": "r:second", "weight": -0.5}]
    folder = tmp_path_factory.mktemp("run")
    return {
        count: trl_trainer(
            run_config(folder, one_layer_model, rewards={"functions": functions[:count]}), one_layer_model
        )
        for count in (1, 2)
    }


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_trl(reference: dict[int, GRPOTrainer], case: str, scale_rewards: str, aggregation: str) -> None:
    rewards = np.array(CASES[case])
    trainer = reference[rewards.shape[1]]
    trainer.scale_rewards, trainer.multi_objective_aggregation = scale_rewards, aggregation
    groups = [rollout_group([[3], [4], [5], [6]], rewards=rewards[i : i + 4].tolist()) for i in (0, 4)]
    expected = trl_inputs(trainer, groups)["advantages"]
    weights = trainer.reward_weights.numpy()
    close(advantages(rewards, weights, 4, scale_rewards=scale_rewards, aggregation=aggregation), expected.numpy())
    assert expected.isfinite().all()


@pytest.fixture(scope="module")
def rloo(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer for RLOO, with weights for two functions."""
    with block_import("vllm"):
        from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(
        str(tmp_path_factory.mktemp("rloo")),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        beta=0.0,
        reward_weights=[1.5, -0.5],
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = RLOOTrainer(
        model=str(one_layer_model),
        reward_funcs=[lambda **_: [], lambda **_: []],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=AutoTokenizer.from_pretrained(one_layer_model, padding_side="left"),
    )
    trainer.model.double()
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_leaving_one_out_is_equal_to_trl(rloo: Any, case: str) -> None:
    rewards = torch.tensor(CASES[case])
    rewards = torch.cat([rewards, torch.full((8, 2 - rewards.shape[1]), NAN)], dim=1)
    rloo._generate = lambda prompts: ([[3]] * 8, [[4]] * 8, [""] * 8)
    rloo._calculate_rewards = lambda *_: rewards
    expected = rloo._generate_and_score_completions([{"prompt": ""}] * 8)["advantages"]
    options = {"scale_rewards": "none", "baseline": "leave_one_out"}
    close(advantages(rewards.numpy(), rloo.reward_weights.numpy(), 4, **options), expected.numpy())
    assert expected.abs().max() > 0.1


# Signal.

COMBINATIONS = list(
    itertools.product(
        ("group", "batch", "none"), ("group", "leave_one_out"), ("sum_then_normalize", "normalize_then_sum")
    )
)
reward_values = st.one_of(st.just(NAN), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 7.0]))
weight_values = st.sampled_from([-0.5, 0.0, 0.25, 1.0])
reward_tables = st.integers(1, 3).flatmap(
    lambda count: st.tuples(
        st.lists(weight_values, min_size=count, max_size=count),
        st.lists(st.lists(reward_values, min_size=count, max_size=count), min_size=2, max_size=5),
    )
)


@pytest.mark.long
@given(reward_tables)
def test_a_group_has_signal_exactly_if_an_advantage_is_not_zero(table: tuple[list[float], list[list[float]]]) -> None:
    weights, rewards = table
    weights_of = np.array(weights)
    group = rollout_group([[3]] * len(rewards), rewards=rewards)
    for scale_rewards, baseline, aggregation in COMBINATIONS:
        signal = RewardRecipe(weights_of, aggregation).signal(group)
        values = advantages(
            np.array(rewards), weights_of, len(rewards),
            scale_rewards=scale_rewards, baseline=baseline, aggregation=aggregation,
        )  # fmt: skip
        assert np.isfinite(values).all()
        assert (signal > 0) == bool((abs(values) > 1e-6).any()), (scale_rewards, baseline, aggregation)


@given(st.lists(reward_values, min_size=2, max_size=6))
def test_signal_is_the_sum_of_the_advantages_before_they_are_divided(values: list[float]) -> None:
    centred, _ = deviations(column(*values))
    group = rollout_group([[3]] * len(values), rewards=values)
    assert RewardRecipe(ONE).signal(group) == pytest.approx(float(abs(centred).sum()), abs=TOLERANCE)
