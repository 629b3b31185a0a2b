"""The advantages of tokens by a teacher, and the signal of a group that has one, by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from replay.credit import CreditRecipe
from replay.distillation import DistillationRecipe, teacher_advantages, teacher_buckets
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config

TAUGHT = rollout_group(
    [[11, 12, 13], [14, 15]],
    sampled=[[True, False, True], [True, True]],
    rewards=[1.0, 1.0],
    logprobs=[[-0.5, 0, -2.0], [-1.0, math.nan]],
    teacher=[-1.5, 0, -0.25, -1.0, -3.0],
)


def recipe(*, rewards: float = 1.0, coef: float = 1.0, alone: bool = False) -> RewardRecipe:
    return RewardRecipe(np.array([rewards], np.float32), distillation=DistillationRecipe(coef, alone))


def test_a_token_has_the_teachers_log_prob_minus_the_policys() -> None:
    assert teacher_advantages(TAUGHT).tolist() == [-1.0, 0, 1.75, 0.0, 0], (
        "what was not sampled, or not scored, has none"
    )
    assert teacher_advantages(rollout_group([[11], [12, 13]])).tolist() == [0, 0, 0], "nobody was asked"


@pytest.mark.parametrize("least", [-9999.0, -100.5])
def test_a_token_that_its_teacher_never_says_has_a_bounded_advantage(least: float) -> None:
    group = rollout_group([[11, 12, 13]], rewards=[1.0], logprobs=[[-0.5, -0.5, -0.5]], teacher=[least, -99.5, -0.5])
    assert teacher_advantages(group).tolist() == [-99.5, -99.0, 0.0]
    assert recipe(coef=2.0, alone=True).signal(group) == 397.0


def test_a_teachers_buckets_begin_with_the_token_itself_and_have_it_once() -> None:
    top = [[(7, -0.5), (11, -1.5)], [(-1, 0), (-1, 0)], [(-1, 0), (8, -0.25)], [(9, -2.0), (8, -9999.0)]]
    group = rollout_group(
        [[11, 12, 13], [14]], sampled=[[True, False, True], [True]], teacher=[-1.5, 0, -2.0, -9999], top=top
    )
    ids, logprobs = teacher_buckets(group)
    assert ids.tolist() == [[11, 7, 11], [12, 12, 12], [13, 13, 8], [14, 9, 8]]
    none = -math.inf
    assert logprobs.tolist() == [[-1.5, -0.5, none], [0, none, none], [-2.0, none, -0.25], [-100, -2, -100]]
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)


def test_a_group_of_equal_rewards_has_the_signal_of_its_teacher() -> None:
    assert RewardRecipe(np.ones(1, np.float32)).signal(TAUGHT) == 0.0
    assert recipe().signal(TAUGHT) == 2.75
    assert recipe(coef=0.5, alone=True).signal(TAUGHT) == 1.375


def test_rewards_that_differ_count_unless_the_teacher_is_alone() -> None:
    group = rollout_group([[11], [12]], rewards=[0.0, 3.0], logprobs=[[-1.0], [-1.0]], teacher=[-1.0, -1.5])
    assert recipe(coef=2.0).signal(group) == 4.0
    assert recipe(coef=2.0, alone=True).signal(group) == 1.0
    same = rollout_group([[11], [12]], rewards=[0.0, 3.0], logprobs=[[-1.0], [-1.0]], teacher=[-1.0, -1.0])
    assert recipe(alone=True).signal(same) == 0.0, "the teacher agrees with the policy in all bits"


def test_one_completion_has_signal() -> None:
    group = rollout_group([[11, 12]], rewards=[1.0], logprobs=[[-1.0, -1.0]], teacher=[-1.0, -1.5])
    assert recipe(alone=True).signal(group) == 0.5


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_without_reward_functions_the_teacher_is_all_there_is(aggregation: str) -> None:
    group = rollout_group([[11], [12]], rewards=[], logprobs=[[-1.0], [-1.0]], teacher=[-1.0, -1.5])
    assert group.rewards.shape == (2, 0)
    taught = RewardRecipe(np.empty(0, np.float32), aggregation, distillation=DistillationRecipe(2.0, alone=True))
    assert taught.signal(group) == 1.0
    assert math.isnan(taught.mean_reward(group))


def test_the_recipe_is_the_configuration(tmp_path: Path) -> None:
    teachers = [{"name": "big", "url": "http://127.0.0.1:8000"}]
    sections = {"teachers": teachers, "distillation": {"mode": "advantage", "coef": 0.5}}
    found = RewardRecipe.of(
        run_config(tmp_path, **sections, rewards={"credit": "per_step"}), "sum_then_normalize", "group"
    )
    assert (found.distillation, found.credit) == (DistillationRecipe(0.5), CreditRecipe("per_step"))
    assert RewardRecipe.of(run_config(tmp_path), "sum_then_normalize", "group").distillation is None
    assert (found.num_top, RewardRecipe.of(run_config(tmp_path), "sum_then_normalize", "group").num_top) == (0, 0)
    for options, expected in (({}, (16, 0.5)), ({"top_k": 4, "beta": 0}, (4, 0.0))):
        divergence = {"distillation": {"mode": "divergence"} | options}
        found = RewardRecipe.of(run_config(tmp_path, **(sections | divergence)), "sum_then_normalize", "group")
        assert found.distillation is not None
        assert (found.distillation.num_top, found.distillation.beta) == expected
    one = {"sampling": {"num_generations": 1}}
    with pytest.raises(ValueError, match=r"sampling\.num_generations"):
        run_config(tmp_path, **sections, **one)
    alone = {"distillation": {"mode": "advantage", "alone": True}}
    assert run_config(tmp_path, **(sections | alone | one)).completions_per_step == 2
    with pytest.raises(ValueError, match=r"rewards\.credit"):
        run_config(tmp_path, **(sections | alone), rewards={"credit": "per_turn"})
