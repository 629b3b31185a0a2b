"""Steps in which each token has an advantage of its own: every cell of a micro-batch, and loss and gradient against sums over
tokens, in float64."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learn.trainer import SlipstreamTrainer
from protocol.wire.codec import encode
from replay.credit import CreditRecipe
from replay.groups import GroupShape, RolloutGroup, message_of
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.learn.test_batches import RECIPE, rows_in_order
from tests.unit.consumer.learn.test_loss_parity import (
    LOSS_TYPES,
    assert_equal,
    assert_equal_whole_and_cut,
    off_policy,
    on_policy,
    some_groups,
    with_tool_results,
)
from tests.unit.consumer.trl_reference import lora_parameters, loss_and_gradients, slipstream_trainer


def recipe(**options: Any) -> RewardRecipe:
    return RewardRecipe(np.ones(1, np.float32), credit=CreditRecipe("per_step", **options), scale_rewards="none")


FORKED = rollout_group(
    [[11, 12, 13], [14, 15, 16, 17], [18]],
    sampled=[[True, False, True], [False, False, True, True], [True]],
    episodes=[0, 0, 1],
    rewards=[0.0, 1.0],
    credit={0: 1.0, 5: 3.0, 7: -1.0},
)


def test_every_cell_of_the_advantages() -> None:
    plain = rollout_group([[19], [20, 21]], rewards=[2.0, 2.0])
    batch = rows_in_order([FORKED, plain], rewards=recipe(gamma=0.5, outcome_weight=2.0))
    # Mean 1, deviations 0, 2, -2, variance 8 / 2; returns 0 + 0.5 · 1, 1, -1; A_i is -0.5 and 0.5.
    half, one = 0.5 * 2 / (2 + 1e-4), 2 / (2 + 1e-4)
    expected = [[half - 1, 0, one - 1, 0], [0, 0, one - 1, -1], [1 - one, 0, 0, 0], [0] * 4, [0] * 4]
    torch.testing.assert_close(batch["advantages"], torch.tensor(expected))
    assert batch["advantages"].dtype == torch.get_default_dtype()


def test_a_row_is_trained_if_any_of_its_tokens_has_an_advantage() -> None:
    even = rollout_group([[11, 12], [13, 14]], rewards=[1.0, 1.0], credit={0: 1.0, 1: -1.0})
    batch = rows_in_order([even], rewards=recipe(), only_advantages=True)
    assert batch["completion_ids"].tolist() == [[11, 12]], "the other one has no span"
    assert batch["advantages"][0, 0] == 0, "1 and -1 are still to come"
    assert batch["advantages"][0, 1] < 0


def test_a_group_from_a_journal_is_trained_bit_for_bit() -> None:
    shape = GroupShape(num_generations=2, num_rewards=1, max_completion_length=6, vocab_size=64)
    again = shape.load(encode(message_of(FORKED)))
    own = dataclasses.replace(RECIPE, rewards=dataclasses.replace(recipe(gamma=0.9), scale_rewards="group"))
    for one, other in zip(own.tensors([FORKED]), own.tensors([again]), strict=True):
        assert {name: values.numpy().tobytes() for name, values in one.items()} == {
            name: values.numpy().tobytes() for name, values in other.items()
        }


def rewarded(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with a reward at every second sampled token, but for the last group."""
    draw = np.random.default_rng(5)
    result = []
    for group in groups[:-1]:
        ends = group.is_sampled & (np.arange(group.num_tokens) % 2 == 0)
        credit = np.where(ends, draw.normal(size=group.num_tokens).round(1), 0).astype(np.float32)
        result.append(dataclasses.replace(group, credit=credit, span_ends=ends))
    return [*result, groups[-1]]


OPTIONS = {"credit": "per_step", "gamma": 0.8, "outcome_weight": 0.5}


def trainer_of(folder: Path, model: Path, rewards: dict[str, Any], **trainer: Any) -> SlipstreamTrainer:
    config = run_config(folder, model, rewards=rewards, trainer=trainer, correction={"ratio_max": 1.5})
    return slipstream_trainer(config, model)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("is_tree", "options"),
    [(True, OPTIONS), (False, OPTIONS), pytest.param(True, {"credit": "given"}, marks=pytest.mark.long)],
)
def test_loss_and_gradient_are_sums_over_tokens(
    tmp_path: Path, one_layer_model: Path, is_tree: bool, options: dict[str, Any]
) -> None:
    """The policy gradient is minus the mean over tokens of A_t times the gradient of log π_t: each row alone, unpadded."""
    ours = trainer_of(tmp_path, one_layer_model, options, loss_type="dapo")
    assert ours.row_passes.kernel is not None
    ours.row_passes.kernel = ours.row_passes.kernel if is_tree else None
    groups = rewarded(on_policy(ours, with_tool_results(some_groups())))
    ours.model.zero_grad()
    num_tokens, total = sum(int(group.is_sampled.sum()) for group in groups), 0.0
    credit = ours.recipe.rewards.credit
    assert credit is not None
    of_outcome = ours.recipe.rewards.advantages(groups).reshape(len(groups), -1)
    for group, outcome in zip(groups, of_outcome, strict=True):
        values = torch.from_numpy(credit.advantages(group, outcome))
        for tokens in group.records:
            ids = torch.tensor([*group.prompt_ids.tolist(), *group.completion_ids[tokens].tolist()])
            logprobs = ours.model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
            loss = -(own * values[tokens]).sum() / num_tokens
            loss.backward()
            total -= values[tokens].sum().item() / num_tokens
    gradient = torch.cat([parameter.grad.flatten() for parameter in lora_parameters(ours)])
    assert_equal_whole_and_cut(ours, groups, (total, gradient), is_tree=is_tree)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_with_the_advantage_of_their_completion_are_the_outcome(
    tmp_path: Path, one_layer_model: Path, loss_type: str
) -> None:
    """Compare under every loss, and under what looks at the sign of an advantage."""
    options = {"loss_type": loss_type, "off_policy_mask_threshold": 0.5}
    ours = trainer_of(tmp_path, one_layer_model, {"credit": "per_turn"}, **options)
    plain = trainer_of(tmp_path, one_layer_model, {}, **options)
    for trainer in (ours, plain):
        trainer._correction = dataclasses.replace(trainer._correction, probability_difference_max=0.01)
    groups = off_policy(ours, with_tool_results(some_groups()))
    assert_equal(
        loss_and_gradients(ours, ours.recipe.tensors(groups)), loss_and_gradients(plain, plain.recipe.tensors(groups))
    )
