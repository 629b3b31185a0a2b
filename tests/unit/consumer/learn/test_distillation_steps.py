"""Steps in which a teacher teaches: every cell of a micro-batch, loss and gradient against sums over tokens in float64, and a
task that rewards alone do not teach."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learn.importance import PRESETS, importance_factors
from consumer.learn.loss import Pass, part_of_loss, token_advantages
from consumer.learn.micro_batches import MicroBatch
from consumer.learn.options import build_arguments
from consumer.learn.trainer import SlipstreamTrainer
from protocol.wire.codec import encode
from replay.distillation import DistillationRecipe, teacher_advantages
from replay.groups import GroupShape, RolloutGroup, message_of
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.learn.test_batches import RECIPE, rows_in_order
from tests.unit.consumer.learn.test_loss_parity import (
    assert_equal,
    assert_equal_whole_and_cut,
    off_policy,
    some_groups,
    with_tool_results,
)
from tests.unit.consumer.trl_reference import lora_parameters, loss_and_gradients, loss_options, slipstream_trainer

TEACHERS = [{"name": "big", "url": "http://127.0.0.1:8000"}]


def recipe(**options: Any) -> RewardRecipe:
    return RewardRecipe(np.ones(1, np.float32), distillation=DistillationRecipe(**options))


TAUGHT = rollout_group(
    [[11, 12, 13], [14, 15, 16, 17], [18]],
    sampled=[[True, False, True], [False, False, True, True], [True]],
    episodes=[0, 0, 1],
    rewards=[0.0, 1.0],
    logprobs=[[-1.0, 0, -2.0], [0, 0, math.nan, -1.0], [-4.0]],
    teacher=[-0.5, 0, -2.0, 0, 0, -1.0, -1.75, -0.25],
)
BY_TEACHER = [[0.5, 0, 0, 0], [0, 0, 0, -0.75], [3.75, 0, 0, 0]]


def test_every_cell_of_a_batch() -> None:
    batch = rows_in_order([TAUGHT], rewards=recipe(coef=0.5))
    assert batch["teacher_advantages"].tolist() == BY_TEACHER
    assert batch["teacher_advantages"].dtype == torch.float32
    assert batch["advantages"].tolist() == [-0.5, -0.5, 0.5]
    both = token_advantages(batch, 0.5)
    torch.testing.assert_close(both, torch.tensor(BY_TEACHER) * 0.5 + batch["advantages"][:, None])
    alone = rows_in_order([TAUGHT], rewards=recipe(alone=True))
    assert alone["teacher_advantages"].tolist() == BY_TEACHER
    assert alone["advantages"].tolist() == [0, 0, 0]


def test_a_row_is_trained_if_its_teacher_moves_a_token() -> None:
    even = rollout_group(
        [[11, 12], [13, 14]],
        rewards=[1.0, 1.0],
        logprobs=[[-1.0, -1.0], [-1.0, -1.0]],
        teacher=[-1.0, -2.0, -1.0, -1.0],
    )
    batch = rows_in_order([even], rewards=recipe(), only_advantages=True)
    assert batch["completion_ids"].tolist() == [[11, 12]], "about the other one they agree"
    assert batch["num_items_in_batch"] == 4


def test_a_group_from_a_journal_is_trained_bit_for_bit() -> None:
    shape = GroupShape(num_generations=2, num_rewards=1, max_completion_length=6, vocab_size=64, has_teacher=True)
    again = shape.load(encode(message_of(TAUGHT)))
    own = dataclasses.replace(RECIPE, rewards=recipe(), scale_rewards="group")
    for one, other in zip(own.tensors([TAUGHT]), own.tensors([again]), strict=True):
        assert {name: values.numpy().tobytes() for name, values in one.items()} == {
            name: values.numpy().tobytes() for name, values in other.items()
        }


def test_groups_of_one_completion_are_trained() -> None:
    one = rollout_group([[11, 12]], rewards=[1.0], logprobs=[[-1.0, -1.0]], teacher=[-0.5, -2.0])
    batch = rows_in_order([one, one], rewards=recipe(alone=True), num_generations=1, only_advantages=True)
    assert batch["teacher_advantages"].tolist() == [[0.5, -1.0]] * 2
    assert batch["advantages"].tolist() == [0, 0]


def test_trl_takes_the_step_for_a_group_where_groups_are_of_one_completion(tmp_path: Path) -> None:
    sections = {"distillation": {"mode": "advantage", "alone": True}, "sampling": {"num_generations": 1}}
    config = run_config(tmp_path, teachers=TEACHERS, pipeline={"groups_per_step": 3}, **sections)
    arguments = build_arguments(config, on_gpu=False, num_prompts=9)
    assert (arguments.per_device_train_batch_size, arguments.max_steps) == (3, 3)


def taught(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with log-probs of a teacher."""
    draw = np.random.default_rng(7)
    return [
        dataclasses.replace(
            group, teacher_logprobs=np.where(group.is_sampled, -draw.exponential(2, group.num_tokens), 0).astype("f4")
        )
        for group in groups
    ]


def trainer_of(folder: Path, model: Path, **options: Any) -> SlipstreamTrainer:
    sections = {"teachers": TEACHERS, "distillation": {"mode": "advantage"} | options}
    trainer = {"loss_type": "dapo"}
    return slipstream_trainer(
        run_config(folder, model, trainer=trainer, correction={"ratio_max": 1.5}, **sections), model
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("is_tree", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_loss_and_gradient_are_sums_over_tokens(
    tmp_path: Path, one_layer_model: Path, is_tree: bool, alone: bool
) -> None:
    """Each row alone and unpadded: minus the mean over tokens of min(p / b, 1.5) (A_i + c (log p_T - log b)) π / p, in the first
    update, in which π = p and no ratio is clipped."""
    ours = trainer_of(tmp_path, one_layer_model, coef=0.5, alone=alone)
    assert ours._kernel is not None
    ours._kernel = ours._kernel if is_tree else None
    groups = taught(off_policy(ours, with_tool_results(some_groups())))
    ours.model.zero_grad()
    num_tokens, total = sum(int(group.is_sampled.sum()) for group in groups), 0.0
    for group in groups:
        rewards = torch.tensor(group.rewards[:, 0])
        of_outcome = (rewards - rewards.mean()) / (rewards.std() + 1e-4) * (not alone)
        for index, tokens in enumerate(group.records):
            ids = torch.tensor([*group.prompt_ids.tolist(), *group.completion_ids[tokens].tolist()])
            logprobs = ours.model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
            for place, sampled in enumerate(group.is_sampled[tokens].tolist()):
                behaviour = float(group.logprobs[tokens][place])
                teacher = float(group.teacher_logprobs[tokens][place])  # type: ignore[index]
                ratio, by_teacher = 1.0, 0.0
                if not math.isnan(behaviour):
                    ratio, by_teacher = min(math.exp(own[place].item() - behaviour), 1.5), teacher - behaviour
                weight = sampled * ratio * (of_outcome[index].item() + 0.5 * by_teacher) / num_tokens
                (-weight * own[place]).backward(retain_graph=True)
                total -= weight
    gradient = torch.cat([parameter.grad.flatten() for parameter in lora_parameters(ours)])
    assert_equal_whole_and_cut(ours, groups, (total, gradient), is_tree=is_tree)
    gains = np.concatenate([teacher_advantages(group)[group.is_sampled] for group in groups])
    assert ours.last is not None
    assert ours.last.metrics["distillation/logprob_gain"] == pytest.approx(gains.mean(), rel=1e-11)


def each_alone(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """A group of each completion."""
    return [
        dataclasses.replace(
            group,
            completion_lengths=group.completion_lengths[number : number + 1],
            rewards=group.rewards[number : number + 1],
            truncated=group.truncated[number : number + 1],
            **{
                name: getattr(group, name)[tokens]
                for name in ("completion_ids", "logprobs", "sampled", "teacher_logprobs")
            },
        )
        for group in groups
        for number, tokens in enumerate(group.records)
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_groups_of_one_completion_teach_what_these_completions_teach_in_larger_groups(
    tmp_path: Path, one_layer_model: Path, loss_type: str
) -> None:
    found = []
    for count in (4, 1):
        sections = {"teachers": TEACHERS, "distillation": {"mode": "advantage", "alone": True}}
        sizes = {"sampling": {"num_generations": count}, "pipeline": {"groups_per_step": 8 // count}}
        config = run_config(tmp_path, one_layer_model, trainer={"loss_type": loss_type}, **sizes, **sections)
        ours = slipstream_trainer(config, one_layer_model)
        groups = taught(off_policy(ours, with_tool_results(some_groups())))
        groups = groups if count > 1 else each_alone(groups)
        found.append(loss_and_gradients(ours, ours.recipe.tensors(groups)))
    assert_equal(*found)


@pytest.mark.usefixtures("float64")
def test_the_ratio_of_the_teachers_part_is_not_clipped_and_its_factor_applies() -> None:
    batch: MicroBatch = {
        "completion_mask": torch.ones(1, 2),
        "advantages": torch.tensor([1.0]),
        "teacher_advantages": torch.tensor([[2.0, -1.0]]),
        "sampling_per_token_logps": torch.tensor([[-2.0, -1.0]]),
        "old_per_token_logps": torch.tensor([[-2.0 + math.log(1.25), -1.0]]),
        "num_items_in_batch": torch.tensor(2),
    }
    current = (batch["old_per_token_logps"] + math.log(2)).requires_grad_()  # π / p = 2, p / b is 1.25 and 1
    factors = importance_factors(
        PRESETS["token_truncate"], current=current, proximal=batch["old_per_token_logps"],
        behaviour=batch["sampling_per_token_logps"], advantages=token_advantages(batch, 0.5), mask=torch.ones(1, 2),
    )  # fmt: skip
    losses, _ = part_of_loss(
        loss_options(loss_type="dapo", beta=0.0),
        batch,
        Pass(current, torch.zeros(1, 2)),
        factors,
        teacher_coef=0.5,
    )
    losses.backward()
    clipped = -(1.2 * 1.25 + 1.2)  # PPO's bound; it has no gradient
    assert losses.item() == pytest.approx((clipped - 0.5 * 2 * 2.0 * 1.25 + 0.5 * 2 * 1.0) / 2, abs=1e-12)
    torch.testing.assert_close(current.grad, torch.tensor([[-0.5 * 2 * 2.0 * 1.25, 0.5 * 2 * 1.0]]) / 2)


PLACES, CHOICES, COMPLETIONS, STEPS = 6, 8, 4, 40
RIGHT = np.array([3, 1, 4, 1, 5, 2])


def chance_after_training(distillation: DistillationRecipe | None, count: int) -> float:
    """Return the probability to solve a task of six tokens that is rewarded if all are right, for a policy that is a table, after
    `STEPS` groups of `count` completions. The teacher says the right ones with probability 0.93."""
    rewards = RewardRecipe(np.ones(1, np.float32), distillation=distillation)
    own = dataclasses.replace(RECIPE, rewards=rewards, num_generations=count, scale_rewards="group")
    table, draw = torch.zeros(PLACES, CHOICES, requires_grad=True), np.random.default_rng(0)
    optimizer = torch.optim.Adam([table], 0.2)
    teacher = np.where(np.arange(CHOICES) == RIGHT[:, None], 0.93, 0.01)
    for _ in range(STEPS):
        chances = table.detach().softmax(-1).double().numpy()
        said = np.stack([draw.choice(CHOICES, count, p=each / each.sum()) for each in chances], 1)
        places = np.arange(PLACES)
        group = rollout_group(
            said.tolist(),
            rewards=(said == RIGHT).all(1).astype(float).tolist(),
            logprobs=np.log(chances[places, said]).tolist(),
            teacher=np.log(teacher[places, said]).flatten().tolist(),
        )
        if rewards.signal(group) == 0.0:
            continue
        [batch] = own.tensors([group])
        logprobs = table.log_softmax(-1).expand(count, -1, -1).gather(2, batch["completion_ids"][..., None])[..., 0]
        factors = importance_factors(
            PRESETS["token_truncate"], current=logprobs, proximal=logprobs.detach(),
            behaviour=batch["sampling_per_token_logps"], advantages=batch["advantages"], mask=batch["completion_mask"],
        )  # fmt: skip
        options = loss_options(loss_type="dapo", beta=0.0, per_device_train_batch_size=count)
        coef = 1.0 if distillation else 0.0
        loss, _ = part_of_loss(options, batch, Pass(logprobs, torch.zeros_like(logprobs)), factors, teacher_coef=coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(table.detach().softmax(-1)[torch.arange(PLACES), torch.from_numpy(RIGHT)].prod())


def test_a_teacher_teaches_what_rewards_alone_do_not() -> None:
    assert chance_after_training(None, COMPLETIONS) == pytest.approx(CHOICES**-PLACES), (
        "no group of the budget was solved"
    )
    best = 0.93**PLACES
    assert chance_after_training(DistillationRecipe(), COMPLETIONS) > 0.5 * best
    assert chance_after_training(DistillationRecipe(alone=True), 1) > 0.5 * best, "one completion is enough"
