"""Steps that learn reference answers beside rewards: every cell of a micro-batch, and loss and gradient against those of the step
without answers plus torch's cross-entropy in float64."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learn.importance import Correction, importance_factors
from consumer.learn.loss import Pass, part_of_loss
from consumer.learn.micro_batches import FILLER, MicroBatch, loss_mask, scored_mask
from consumer.learn.trainer import SlipstreamTrainer
from consumer.ranks.exchange import Train, decode, encode
from replay.batch_selection import Answers, TrainingBatch
from replay.groups import RolloutGroup
from tests.unit.consumer.builders import SHAPE, rollout_group, run_config
from tests.unit.consumer.learn.test_batches import RECIPE
from tests.unit.consumer.learn.test_loss_parity import (
    LOSS_TYPES,
    assert_equal,
    off_policy,
    some_groups,
    with_tool_results,
)
from tests.unit.consumer.trl_reference import (
    inputs_of_logprobs,
    lora_parameters,
    loss_and_gradients,
    loss_options,
    metrics_of,
    slipstream_trainer,
)

ANSWERS: Answers = [np.array([20, 21, 22, 23, 1], np.int32), None, np.array([30, 1], np.int32)]
COEF = 0.25
OF_STEP = ("ce_loss", "policy_loss")
"""The metrics that a step without answers does not have."""


def test_every_cell_of_a_batch() -> None:
    groups = [
        rollout_group([[11, 12], [13]], prompt=[1, 2], sampled=[[True, False], [True]], rewards=[0.0, 1.0]),
        rollout_group([[14], [15]], prompt=[5], rewards=[0.0, 1.0]),
        rollout_group([[16], [17]], prompt=[6], rewards=[0.0, 1.0]),
    ]
    [batch] = RECIPE.tensors(groups, [np.array([20, 21, 1], np.int32), None, np.array([1], np.int32)])
    of_row = {int(row): index for index, row in enumerate(batch["row"])}
    order = [of_row[number] for number in (0, 1, 6, 8)]  # answers are numbered behind the six completions
    cells = {name: values[order].tolist() for name, values in batch.items() if values.ndim}
    assert cells["row"] == [0, 1, 6, 8]
    assert cells["prompt_ids"] == [[1, 2], [1, 2], [1, 2], [0, 6]]
    assert cells["completion_ids"] == [[11, 12, 0], [13, 0, 0], [20, 21, 1], [1, 0, 0]]
    assert cells["completion_mask"] == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert cells["answer_mask"] == [[0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert cells["tool_mask"][2] == [1, 1, 1]
    assert cells["advantages"] == [-0.5, 0.5, 0.0, 0.0]
    assert cells["sampling_per_token_logps"][2:] == [[0, 0, 0]] * 2
    assert loss_mask(batch)[order].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert scored_mask(batch)[order].tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    with torch.no_grad():
        assert torch.equal(scored_mask(batch), loss_mask(batch)), "log-probs of fixed policies take none of answers"
    assert (batch["num_items_in_batch"], batch["num_answer_tokens"]) == (6, 4)


def test_answers_share_the_prompt_and_are_trained_where_completions_are_not() -> None:
    recipe = dataclasses.replace(RECIPE, tree=True, only_advantages=True, max_tokens=11)
    equal = rollout_group([[11, 12], [13]], prompt=[1, 2, 3, 4, 5], rewards=[1.0, 1.0])
    moving = rollout_group([[11, 12], [13]], prompt=[1, 2, 3, 4, 5], rewards=[0.0, 1.0])
    [batch] = recipe.tensors([moving], [np.array([20, 21, 1], np.int32)])  # 5 + 2 + 1 + 3 places
    assert len(batch["row"]) == 3
    [batch] = recipe.tensors([equal], [np.array([20, 21, 1], np.int32)])
    assert batch["row"].tolist() == [2]
    [batch] = recipe.tensors([equal], [None])
    assert batch["answer_mask"].sum() == batch["num_answer_tokens"] == 0
    assert "answer_mask" not in recipe.tensors([equal])[0]


def test_a_rank_that_fills_up_has_no_answer() -> None:
    recipe = dataclasses.replace(RECIPE, in_step=True, world=2, max_tokens=2)
    group = rollout_group([[11, 12], [13, 14]], prompt=[1], rewards=[0.0, 1.0])
    parts = [dataclasses.replace(recipe, rank=rank).tensors([group], [np.array([1], np.int32)]) for rank in (0, 1)]
    rows = {int(row): batch for of_rank in parts for batch in of_rank for row in batch["row"]}
    assert set(rows) == {0, 1, 2, FILLER}
    assert rows[FILLER]["answer_mask"].sum() == 0
    assert rows[2]["answer_mask"].sum() == 1


def test_ranks_get_the_answers_of_rank_0() -> None:
    groups = [rollout_group([[3], [4], [5], [6]]), rollout_group([[3], [4], [5], [6]], lease_id="s-2")]
    plan = decode(encode(Train.of(TrainingBatch(1, 1, 1, groups, 2, answers=ANSWERS[:2]))))
    assert isinstance(plan, Train)
    first, second = plan.batch(SHAPE).answers
    assert first is not None
    assert (first.tolist(), second) == ([20, 21, 22, 23, 1], None)
    assert len(Train.of(TrainingBatch(1, 1, 1, groups, 2)).batch(SHAPE).answers) == 0


@pytest.mark.usefixtures("float64")
def test_the_parts_of_the_loss_by_hand() -> None:
    """A completion of two tokens with advantage 2, and an answer of two of the step's four tokens."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    batch: MicroBatch = inputs_of_logprobs(
        logprobs.detach() * torch.tensor([[1.0], [0.0]]), torch.tensor([2.0, 0.0]),
        answer_mask=torch.tensor([[0, 0], [1, 1]]), num_answer_tokens=torch.tensor(4),
    ) | {"num_items_in_batch": torch.tensor(2)}  # fmt: skip
    factors = importance_factors(
        Correction("token", "truncate", 0.0, 3.0), current=logprobs, proximal=logprobs,
        behaviour=batch["sampling_per_token_logps"], advantages=batch["advantages"], mask=loss_mask(batch),
    )  # fmt: skip
    loss, seen = part_of_loss(
        loss_options(loss_type="dapo", beta=0.0), batch, Pass(logprobs, torch.ones(2, 2)), factors, answer_coef=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(-2.0 + 0.5 * 3.5 / 4, abs=1e-12)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1.0], [-0.125, -0.125]]))
    assert seen["ce_loss"].tolist() == pytest.approx([math.nan, math.nan, 3.0, 0.5], nan_ok=True)
    assert seen["policy_loss"].tolist() == [-2.0]


def cross_entropy(
    trainer: SlipstreamTrainer, groups: list[RolloutGroup], answers: Answers
) -> tuple[float, torch.Tensor]:
    """Loss and gradient by torch, each answer alone behind its prompt."""
    trainer.model.zero_grad()
    logits, targets = [], []
    for group, answer in zip(groups, answers, strict=True):
        if answer is not None:
            ids = torch.tensor([*group.prompt_ids.tolist(), *answer.tolist()])
            logits.append(trainer.model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1])
            targets.append(ids[len(group.prompt_ids) :])
    temperature = trainer.args.temperature
    loss = torch.nn.functional.cross_entropy(torch.cat(logits) / temperature, torch.cat(targets))
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in lora_parameters(trainer)])


def trainer_of(folder: Path, model: Path, **options: Any) -> SlipstreamTrainer:
    config = run_config(
        folder, model, trainer={"loss_type": options.pop("loss_type", "dapo")} | options, correction={"ratio_max": 1.5},
        dataset={"answer_column": "answer"}, loss={"ce_coef": COEF}, sampling={"temperature": 0.7},
    )  # fmt: skip
    return slipstream_trainer(config, model)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.1, "num_iterations": 2},
    {"top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    {"importance_sampling_level": "sequence", "mask_truncated_completions": True, "off_policy_mask_threshold": 0.5},
    *({"loss_type": name} for name in LOSS_TYPES if name != "dapo"),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.long
@pytest.mark.parametrize("is_tree", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_is_that_of_the_rewards_and_the_cross_entropy(
    tmp_path: Path, one_layer_model: Path, options: dict[str, Any], is_tree: bool
) -> None:
    ours = trainer_of(tmp_path, one_layer_model, **options)
    assert ours.row_passes.kernel is not None
    ours.row_passes.kernel = ours.row_passes.kernel if is_tree else None
    groups = off_policy(ours, with_tool_results(some_groups(3)))
    ce_loss, ce_gradient = cross_entropy(ours, groups, ANSWERS)
    ours.recipe = dataclasses.replace(ours.recipe, tree=is_tree)
    loss, gradient = loss_and_gradients(ours, ours._prepare_inputs(ours.recipe.tensors(groups)))
    metrics = metrics_of(ours)
    for max_tokens, cut in ((1000, False), (16, True)):
        ours.recipe = dataclasses.replace(ours.recipe, max_tokens=max_tokens)
        batches = ours._prepare_inputs(ours.recipe.tensors(groups, ANSWERS))
        assert (len(batches) > 1) == cut
        assert_equal(loss_and_gradients(ours, batches), (loss + COEF * ce_loss, gradient + COEF * ce_gradient))
        found = metrics_of(ours)
        assert found["ce_loss"] == pytest.approx(ce_loss, rel=1e-11)
        own = {name: value for name, value in found.items() if name not in OF_STEP}
        assert own == pytest.approx({name: metrics[name] for name in own}, rel=1e-10, abs=1e-12), "those of rewards"
        assert set(metrics) - set(own) <= set(OF_STEP)


@pytest.mark.usefixtures("float64")
def test_a_step_in_which_no_row_has_an_answer_is_that_of_the_rewards(tmp_path: Path, one_layer_model: Path) -> None:
    ours = trainer_of(tmp_path, one_layer_model)
    groups = off_policy(ours, some_groups())
    expected = loss_and_gradients(ours, ours.recipe.tensors(groups))
    assert_equal(loss_and_gradients(ours, ours.recipe.tensors(groups, [None, None])), expected)
    assert "ce_loss" not in metrics_of(ours)
