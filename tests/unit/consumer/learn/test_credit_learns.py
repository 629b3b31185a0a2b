"""A task of six turns that is solved if each says the right one of eight tokens: what its outcome teaches, and its turns.

The policy is a table, which samples and is trained with the trainer's own batches and loss.
"""

import dataclasses

import numpy as np
import pytest
import torch

from consumer.learn.importance import PRESETS, importance_factors
from consumer.learn.loss import Pass, part_of_loss
from replay.credit import CreditRecipe
from replay.groups import RolloutGroup
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group
from tests.unit.consumer.learn.test_batches import RECIPE
from tests.unit.consumer.trl_reference import loss_options

TURNS, CHOICES, COMPLETIONS, STEPS = 6, 8, 8, 60
RIGHT = np.array([3, 1, 4, 1, 5, 2])


def sampled(table: torch.Tensor, draw: np.random.Generator) -> RolloutGroup:
    """Sample episodes, turn by turn, with a shown token between two turns. The last token of a turn has its reward."""
    chances = table.detach().softmax(-1).double().numpy()
    said = np.stack([draw.choice(CHOICES, COMPLETIONS, p=each / each.sum()) for each in chances], 1)
    ids = np.full((COMPLETIONS, 2 * TURNS - 1), CHOICES)
    ids[:, ::2] = said
    is_right = said == RIGHT
    logprobs = np.zeros(ids.shape)
    logprobs[:, ::2] = np.log(chances[np.arange(TURNS), said])
    mask = [[place % 2 == 0 for place in range(ids.shape[1])]] * COMPLETIONS
    spans = dict(zip(np.flatnonzero(np.concatenate(mask)).tolist(), is_right.flatten().astype(float), strict=True))
    outcome = is_right.all(1).astype(float).tolist()
    return rollout_group(ids.tolist(), sampled=mask, logprobs=logprobs.tolist(), rewards=outcome, credit=spans)


def chance_after_training(credit: CreditRecipe | None) -> tuple[float, int]:
    """Return the probability to solve the task after `STEPS` groups, and how many of them had signal."""
    rewards = RewardRecipe(np.ones(1, np.float32), credit=credit)
    recipe = dataclasses.replace(RECIPE, rewards=rewards, num_generations=COMPLETIONS)
    table, draw, num_trained = torch.zeros(TURNS, CHOICES, requires_grad=True), np.random.default_rng(0), 0
    options = loss_options(loss_type="dapo", beta=0.0, per_device_train_batch_size=COMPLETIONS)
    optimizer = torch.optim.Adam([table], 0.2)
    for _ in range(STEPS):
        group = sampled(table, draw)
        if rewards.signal(group) == 0.0:
            continue
        num_trained += 1
        [batch] = recipe.tensors([group])
        turn = torch.arange(2 * TURNS - 1) // 2
        ids = batch["completion_ids"].clamp(max=CHOICES - 1)  # what was shown is in no loss
        logprobs = table.log_softmax(-1)[turn].expand(len(ids), -1, -1).gather(2, ids[..., None])[..., 0]
        factors = importance_factors(
            PRESETS["token_truncate"], current=logprobs, proximal=logprobs.detach(),
            behaviour=batch["sampling_per_token_logps"], advantages=batch["advantages"], mask=batch["tool_mask"],
        )  # fmt: skip
        loss, _ = part_of_loss(options, batch, Pass(logprobs, torch.zeros_like(logprobs)), factors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(table.detach().softmax(-1)[torch.arange(TURNS), torch.from_numpy(RIGHT)].prod()), num_trained


def test_rewards_of_turns_teach_what_the_outcome_alone_does_not() -> None:
    by_outcome, num_with_signal = chance_after_training(None)
    assert (by_outcome, num_with_signal) == (pytest.approx(CHOICES**-TURNS), 0), "no group of the budget was solved"
    by_turns, num_with_signal = chance_after_training(CreditRecipe("per_turn"))
    assert by_turns > 0.9
    assert num_with_signal >= STEPS / 2, "once it is learned, turns differ no more"
