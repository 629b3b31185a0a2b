"""Batches in a real trainer: partial ones, and groups that are trained again in other company. It computes in float64."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consumer.app.run import Liveness
from consumer.learn.importance import PRESETS
from consumer.learn.micro_batches import MicroBatch
from consumer.learn.trainer import SlipstreamTrainer
from consumer.waiting import ThreadErrors
from replay.batch_selection import TrainingBatch
from replay.groups import RolloutGroup
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import loss_and_gradients, metrics_of, perturb, slipstream_trainer

SEQUENCE_MEANS = ("grpo", "sapo", "luspo", "dr_grpo")
TOKEN_MEANS = ("dapo", "cispo", "vespo", "bnpo")
NUM_GROUPS = 4  # of a full batch
TOLERANCE = 1e-11  # of log-probs, and of the largest gradient

pytestmark = pytest.mark.usefixtures("float64")


def some_groups(count: int, *, flat: bool = False, sampled: bool = False, seed: int = 0) -> list[RolloutGroup]:
    """Groups of mixed lengths: without signal if `flat`, without sampling log-probs (the ratio is 1) unless `sampled`."""
    draw = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        completions = [draw.integers(3, 40, n).tolist() for n in draw.integers(1, 7, 4)]
        rewards = [1.0] * 4 if flat else draw.normal(size=4).tolist()
        logprobs = [
            draw.uniform(-4.0, -2.0, len(ids)).tolist() if sampled else [math.nan] * len(ids) for ids in completions
        ]
        prompt = draw.integers(3, 40, 2 + 3 * index).tolist()
        groups.append(rollout_group(completions, prompt=prompt, rewards=rewards, logprobs=logprobs))
    return groups


def new_trainer(folder: Path, model: Path, **options: Any) -> SlipstreamTrainer:
    pipeline = {"groups_per_step": NUM_GROUPS, "trainer_tokens_per_micro_batch": 60}
    config = run_config(folder, model, pipeline=pipeline, trainer=options)
    return slipstream_trainer(config, model)


@pytest.fixture(scope="module")
def trainer(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SlipstreamTrainer:
    return new_trainer(tmp_path_factory.mktemp("run"), one_layer_model)


@pytest.fixture(scope="module")
def busy(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SlipstreamTrainer:
    """One that uses everything in TRL's loss that divides by a count of tokens."""
    options = {"beta": 0.1, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.5, "entropy_coef": 0.05}
    return new_trainer(tmp_path_factory.mktemp("run"), one_layer_model, **options)


def trained(trainer: SlipstreamTrainer, batches: list[MicroBatch]) -> tuple[float, torch.Tensor]:
    return loss_and_gradients(trainer, trainer._prepare_inputs(batches))


def assert_same_gradient(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().item()
    assert scale > 1e-4, "the comparison must compare something"
    torch.testing.assert_close(actual / scale, expected / scale, atol=TOLERANCE, rtol=0)


# Small batches.


@pytest.mark.parametrize("loss_type", SEQUENCE_MEANS + TOKEN_MEANS)
def test_a_small_batch_is_a_full_one_whose_other_groups_have_no_advantage(
    trainer: SlipstreamTrainer, loss_type: str
) -> None:
    """And as many tokens as those that are there, where the loss is a mean over tokens."""
    trainer.args.loss_type = loss_type
    small = trainer.recipe.tensors(some_groups(2))
    full = trainer.recipe.tensors(some_groups(2) + some_groups(2, flat=True))
    assert_same_gradient(trained(trainer, small)[1], trained(trainer, full)[1])


def test_groups_without_signal_and_rows_without_advantage_never_reach_the_model(trainer: SlipstreamTrainer) -> None:
    moving = some_groups(2)
    batches = trainer.recipe.tensors([*moving, *some_groups(2, flat=True, seed=1)])
    assert sum(len(rows_of(batch)) for batch in batches) == 8
    assert batches[0]["num_items_in_batch"] > sum(group.num_tokens for group in moving)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", [*SEQUENCE_MEANS, *TOKEN_MEANS, "bnpo"])
def test_a_micro_batch_that_counts_nowhere_gives_zero_and_no_nan(
    busy: SlipstreamTrainer, loss_type: str, level: str
) -> None:
    busy.args.loss_type, busy.args.importance_sampling_level = loss_type, level
    [empty] = busy.recipe.tensors(some_groups(1)[:1])[:1]
    empty["completion_mask"].zero_()
    empty["num_items_in_batch"].zero_()
    loss, gradient = trained(busy, [empty])
    assert loss == 0.0
    assert (gradient == 0.0).all()
    busy.add_to_log(metrics_of(busy))
    logged: dict[str, float | None] = {}
    busy.log(logged)
    assert not any(isinstance(value, float) and math.isnan(value) for value in logged.values())


@pytest.mark.long
def test_training_with_a_small_batch(tmp_path: Path, one_layer_model: Path) -> None:
    options = {"beta": 0.1, "max_steps": 2, "save_strategy": "no", "max_grad_norm": 1.0}
    trainer = new_trainer(tmp_path, one_layer_model, **options)
    trainer._batches = [
        TrainingBatch(first_step=1, num_iterations=1, last_step=1, groups=some_groups(1), num_fresh=1),
        TrainingBatch(first_step=2, num_iterations=1, last_step=2, groups=some_groups(NUM_GROUPS, seed=1), num_fresh=4),
    ]
    beats: list[str] = []
    health: Any = SimpleNamespace(beat=beats.append)
    trainer.add_callback(Liveness(health, lambda: False, ThreadErrors()))
    trainer.train()
    assert trainer.state.global_step == 2
    micro_batches = [len(trainer.recipe.tensors(batch.groups)) for batch in trainer._batches]
    assert micro_batches[1] > 1
    assert len(beats) == sum(micro_batches) + 2, "one for each micro-batch, and one for the begin of each step"
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in ("loss", "grad_norm", "kl", "entropy"):
        assert all(math.isfinite(step[name]) for step in steps), name
    assert all(step["grad_norm"] > 0 for step in steps)


# Ranks.


@pytest.mark.long
@pytest.mark.parametrize("loss_type", SEQUENCE_MEANS + TOKEN_MEANS)
def test_the_gradients_of_ranks_add_up_to_that_of_one(
    trainer: SlipstreamTrainer, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    monkeypatch.setattr(trainer.args, "loss_type", loss_type)
    for groups, world in (
        (some_groups(3), 2),
        (some_groups(3), 3),
        (some_groups(1), 5),
    ):  # at last more ranks than rows
        _, expected = trained(trainer, trainer.recipe.tensors(groups))
        recipes = [dataclasses.replace(trainer.recipe, rank=rank, world=world) for rank in range(world)]
        gradients = [trained(trainer, recipe.tensors(groups))[1] for recipe in recipes]
        assert_same_gradient(torch.stack(gradients).sum(0), expected)


# Groups that are trained again.


def rows_of(batch: MicroBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and completion of every row, read through the masks."""
    return [
        (tuple(prompt[prompt_mask.bool()].tolist()), tuple(completion[mask.bool()].tolist()))
        for prompt, prompt_mask, completion, mask in zip(
            batch["prompt_ids"],
            batch["prompt_mask"],
            batch["completion_ids"],
            batch["completion_mask"],
            strict=True,
        )
    ]


def policy_logprobs(trainer: SlipstreamTrainer, batch: MicroBatch) -> torch.Tensor:
    """(B, T), under the trainer's policy."""
    with torch.no_grad():
        return trainer.forward_pass(batch).logprobs


@pytest.mark.long
def test_a_replayed_group_has_no_holes_and_loses_no_prompt_end_in_other_widths(trainer: SlipstreamTrainer) -> None:
    """A peer writes the left-padded prompts of replayed groups into batches of other widths."""
    short = rollout_group([[5], [6, 7, 8, 9, 10, 11], [12, 13], [14]], prompt=[3])
    long = rollout_group([[15, 16, 17], [18], [19], [20, 21]], prompt=list(range(3, 23)))
    longest = rollout_group([[22], [23, 24, 25, 26, 27], [28], [29]], prompt=list(range(10, 40)))
    alone = {}
    one_by_one = dataclasses.replace(trainer.recipe, max_tokens=1, only_advantages=False)
    for batch in one_by_one.tensors([short, long, longest]):
        assert batch["prompt_mask"].all()
        assert batch["completion_mask"].all()
        alone[rows_of(batch)[0]] = policy_logprobs(trainer, batch)[0]
    assert len(alone) == 12
    widths = set()
    for groups in ([short, long], [short, longest], [long, longest], [short], [short, long, longest]):
        for max_tokens in (23, 70, 1000):
            recipe = dataclasses.replace(one_by_one, max_tokens=max_tokens)
            for batch in recipe.tensors(groups):
                widths.add((batch["prompt_ids"].size(1), batch["completion_ids"].size(1)))
                together = policy_logprobs(trainer, batch)
                for row, values in zip(rows_of(batch), together, strict=True):
                    torch.testing.assert_close(values[: len(row[1])], alone[row], atol=TOLERANCE, rtol=0)
    assert len(widths) > 4


def test_a_replayed_group_gets_its_ratio_from_the_policy_that_trains_it(
    trainer: SlipstreamTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer keeps the ratio of the first time. Here the batch is trained twice, by two policies."""
    monkeypatch.setattr(trainer, "_correction", dataclasses.replace(PRESETS["token_truncate"], ratio_max=1e9))
    groups, means = some_groups(3, sampled=True), []
    for step in range(2):
        batches = trainer._prepare_inputs(trainer.recipe.tensors(groups))
        loss_and_gradients(trainer, batches)
        ratios = []
        for batch in batches:
            log_ratio = policy_logprobs(trainer, batch) - batch["sampling_per_token_logps"]
            ratios.append(log_ratio.exp()[batch["completion_mask"].bool()])
        means.append(metrics_of(trainer)["sampling/importance_sampling_ratio/corrected/mean"])
        assert means[-1] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-9)
        perturb(trainer, seed=step)
    assert means[0] != pytest.approx(means[1], rel=0.01)
