"""Steps in which rows weigh the parts of the loss: every cell of a micro-batch, the loss by hand, and gradients as sums of those
of single parts in float64."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from consumer.learn.importance import Correction, importance_factors
from consumer.learn.loss import Pass, part_of_loss, token_advantages
from consumer.learn.micro_batches import MicroBatch, loss_mask
from consumer.ranks.exchange import Train, decode, encode
from replay.batch_selection import LossWeights, TrainingBatch
from tests.unit.consumer.builders import SHAPE, rollout_group
from tests.unit.consumer.learn.test_answer_steps import ANSWERS, trainer_of
from tests.unit.consumer.learn.test_batches import RECIPE
from tests.unit.consumer.learn.test_distillation_steps import TAUGHT, TOPPED, recipe
from tests.unit.consumer.learn.test_loss_parity import assert_equal, off_policy, some_groups
from tests.unit.consumer.trl_reference import inputs_of_logprobs, loss_and_gradients, loss_options

ANSWER = np.array([20, 21, 1], np.int32)


def test_every_cell_of_a_batch() -> None:
    groups = [rollout_group([[11], [12]], prompt=[prompt], rewards=[0.0, 1.0]) for prompt in (1, 2)]
    weights: LossWeights = [(0.5, 2.0, 3.0), (1.0, 1.0, 0.0)]
    [batch] = RECIPE.tensors(groups, [ANSWER, ANSWER], weights)
    of_row = dict(zip(batch["row"].tolist(), batch["loss_weights"].tolist(), strict=True))
    assert of_row == {0: [0.5, 2, 3], 1: [0.5, 2, 3], 2: [1, 1, 0], 3: [1, 1, 0], 4: [0.5, 2, 3]}
    assert batch["num_answer_tokens"] == 6, "an answer of weight 0 is no row, but its tokens are counted"
    assert "loss_weights" not in RECIPE.tensors(groups, [ANSWER, ANSWER])[0]


def test_rows_that_their_weights_leave_without_a_part_are_left_out() -> None:
    moving = rollout_group([[11], [12]], rewards=[0.0, 1.0])
    own = dataclasses.replace(RECIPE, only_advantages=True)
    assert own.tensors([moving], [ANSWER], [(0.0, 1.0, 1.0)])[0]["row"].tolist() == [2]
    for group, taught in ((TAUGHT, recipe(alone=True)), (TOPPED, recipe(num_top=2, alone=True))):
        kept = dataclasses.replace(own, rewards=taught).tensors([group, group], weights=[(0, 1, 1), (1, 0, 1)])
        assert all(row < len(group.records) for batch in kept for row in batch["row"].tolist())


@pytest.mark.usefixtures("float64")
def test_the_parts_of_the_loss_by_hand() -> None:
    """Completions of two tokens and of one, with advantages 2 and 1, and an answer of two of the step's four tokens."""
    logprobs = torch.tensor([[-1.0, -2.0], [-1.5, 0.0], [-3.0, -0.5]], requires_grad=True)
    batch: MicroBatch = inputs_of_logprobs(
        logprobs.detach() * torch.tensor([[1.0], [1.0], [0.0]]), torch.tensor([2.0, 1.0, 0.0]),
        answer_mask=torch.tensor([[0, 0], [0, 0], [1, 1]]), num_answer_tokens=torch.tensor(4),
        teacher_advantages=torch.tensor([[0.25, 0.0], [-1.0, 0.0], [0.0, 0.0]]),
        loss_weights=torch.tensor([[0.5, 4.0, 1.0], [3.0, 0.5, 1.0], [1.0, 1.0, 0.25]]),
    ) | {"num_items_in_batch": torch.tensor(4)}  # fmt: skip
    assert token_advantages(batch, 2.0).tolist() == [[3.0, 1.0], [2.0, 3.0], [0.0, 0.0]]
    factors = importance_factors(
        Correction("token", "truncate", 0.0, 3.0), current=logprobs, proximal=logprobs,
        behaviour=batch["sampling_per_token_logps"], advantages=batch["advantages"], mask=loss_mask(batch),
    )  # fmt: skip
    loss, _ = part_of_loss(
        loss_options(loss_type="dapo", beta=0.0), batch, Pass(logprobs, torch.ones(3, 2)), factors, teacher_coef=2.0,
        answer_coef=0.5,
    )  # fmt: skip
    of_rewards = -(0.5 * 2 + 0.5 * 2 + 3 * 1 + 3 * 1) / 4
    of_teacher = -2 * (4 * 0.25 + 0.5 * -1) / 4
    assert loss.item() == pytest.approx(of_rewards + of_teacher + 0.5 * 0.25 * 3.5 / 4, abs=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "vespo"])
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("only_advantages", [True, False])
def test_the_loss_of_a_weight_of_0_is_that_of_a_weight_close_to_0(
    loss_type: str, part: int, only_advantages: bool
) -> None:
    """The second of two groups has the weight; every sampled token has log-prob -1."""
    own = dataclasses.replace(RECIPE, rewards=recipe(), only_advantages=only_advantages)
    correction = Correction("token", "truncate", 0.0, 3.0)

    def loss_of(weight: float) -> float:
        weights = tuple(weight if number == part else 1.0 for number in range(3))
        parts = []
        for batch in own.tensors([TAUGHT, TAUGHT], [ANSWER, ANSWER[:2]], [(1.0, 1.0, 1.0), weights]):
            logprobs = -torch.ones(batch["completion_ids"].shape)
            factors = importance_factors(
                correction, current=logprobs, proximal=logprobs, behaviour=logprobs,
                advantages=token_advantages(batch, 1.0), mask=loss_mask(batch),
            )  # fmt: skip
            loss, _ = part_of_loss(
                loss_options(loss_type=loss_type, beta=0.0), batch, Pass(logprobs, torch.ones(logprobs.shape)), factors,
                teacher_coef=1.0, answer_coef=1.0,
            )  # fmt: skip
            parts.append(loss.item())
        return sum(parts)

    assert loss_of(0.0) == pytest.approx(loss_of(1e-9), abs=1e-7)
    assert loss_of(0.0) != pytest.approx(loss_of(0.5), abs=1e-3)


@pytest.mark.usefixtures("float64")
@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo"])
def test_a_step_is_the_weighted_sum_of_its_parts(tmp_path: Path, one_layer_model: Path, loss_type: str) -> None:
    ours = trainer_of(tmp_path, one_layer_model, loss_type=loss_type)
    groups = off_policy(ours, some_groups(2))
    answers = [ANSWERS[0], ANSWERS[2]]

    def step(*weights: tuple[float, ...]) -> tuple[float, torch.Tensor]:
        return loss_and_gradients(ours, ours._prepare_inputs(ours.recipe.tensors(groups, answers, weights)))

    first, second = step((1, 1, 0), (0, 1, 0)), step((0, 1, 0), (1, 1, 0))
    of_answers = step((0, 1, 0.5), (0, 1, 0.5))
    expected = [0.25 * a + 3 * b + 2 * c for a, b, c in zip(first, second, of_answers, strict=True)]
    assert_equal(step((0.25, 1, 1), (3, 1, 1)), (expected[0], expected[1]))
    assert_equal(step((1, 1, 1), (1, 1, 1)), loss_and_gradients(ours, ours.recipe.tensors(groups, answers)))
    assert of_answers[0] > 0


def test_ranks_get_the_weights_of_rank_0() -> None:
    groups = [rollout_group([[3], [4], [5], [6]])]
    plan = decode(encode(Train.of(TrainingBatch(1, 1, 1, groups, 1, weights=[(0.1, 0.0, 2.0)]))))
    assert isinstance(plan, Train)
    assert plan.batch(SHAPE).weights == [(0.1, 0.0, 2.0)]
