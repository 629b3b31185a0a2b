"""Groups become tensors: dealt across micro-batches, each padded to its own longest, log-probs beside their tokens."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumer.advantages import advantages
from consumer.batches import BatchRecipe, MicroBatch
from replay.groups import RolloutGroup
from replay.rewards import OverlongPenalty, RewardRecipe

from .builders import rollout_group

PAD = 0
RECIPE = BatchRecipe(
    rewards=RewardRecipe(np.ones(1, np.float32)),
    num_generations=2,
    num_completions=4,
    micro_batch_size=4,
    pad_token_id=PAD,
    scale_rewards="none",
    baseline="group",
    mask_truncated=False,
    seed=0,
)


def in_order(recipe: BatchRecipe, groups: list[RolloutGroup]) -> MicroBatch:
    """The only micro-batch of these groups, its rows in the order of the groups."""
    [batch] = dataclasses.replace(recipe, num_completions=2 * len(groups)).tensors(groups, step=0)
    num_items = batch.pop("num_items_in_batch")
    order = np.argsort(recipe.row_order(len(groups), step=0)).tolist()
    return {name: tensor[order] for name, tensor in batch.items()} | {"num_items_in_batch": num_items}


def test_every_cell_of_a_batch() -> None:
    groups = [
        rollout_group([[11, 12, 13], [14]], prompt=[1, 2, 3], rewards=[0.0, 1.0], truncated=[True, False]),
        rollout_group([[15, 16], [17, 18]], prompt=[4], rewards=[1.0, 5.0]),
    ]
    batch = in_order(RECIPE, groups)
    assert batch["prompt_ids"].tolist() == [[1, 2, 3], [1, 2, 3], [0, 0, 4], [0, 0, 4]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert batch["completion_ids"].tolist() == [[11, 12, 13], [14, 0, 0], [15, 16, 0], [17, 18, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]
    torch.testing.assert_close(
        batch["sampling_per_token_logps"],
        torch.tensor([[-0.1, -0.2, -0.3], [-0.4, 0, 0], [-0.1, -0.2, 0], [-0.3, -0.4, 0]]),
    )
    assert batch["advantages"].tolist() == [-0.5, 0.5, -2.0, 2.0]
    assert batch["num_items_in_batch"].item() == 8
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "prompt_ids": torch.int64,
        "prompt_mask": torch.int64,
        "completion_ids": torch.int64,
        "completion_mask": torch.int64,
        "sampling_per_token_logps": torch.float32,
        "advantages": torch.float32,
        "num_items_in_batch": torch.int64,
    }


def test_micro_batches_are_padded_to_their_own_longest_and_share_the_count_of_tokens() -> None:
    groups = [rollout_group([[11], [12]], prompt=[1]), rollout_group([[13, 14, 15, 16], [17]], prompt=[2, 3, 4])]
    batches = dataclasses.replace(RECIPE, micro_batch_size=1).tensors(groups, step=0)
    assert sorted(batch["completion_ids"].tolist() for batch in batches) == [[[11]], [[12]], [[13, 14, 15, 16]], [[17]]]
    assert sorted(batch["prompt_ids"].tolist() for batch in batches) == [[[1]], [[1]], [[2, 3, 4]], [[2, 3, 4]]]
    assert [batch["num_items_in_batch"].item() for batch in batches] == [7] * 4


def test_a_group_is_split_over_micro_batches_and_its_completions_keep_their_advantages() -> None:
    groups = [rollout_group([[n], [n + 1]], rewards=[0.0, float(n)]) for n in (10, 20)]
    batches = dataclasses.replace(RECIPE, micro_batch_size=2).tensors(groups, step=0)
    seen = {}
    for batch in batches:
        seen |= dict(zip(batch["completion_ids"][:, 0].tolist(), batch["advantages"].tolist(), strict=True))
    assert seen == {10: -5.0, 11: 5.0, 20: -10.0, 21: 10.0}


def test_truncated_completions_are_masked_whole_and_not_counted_but_keep_their_reward_in_the_baseline() -> None:
    groups = [rollout_group([[11, 12], [13]], rewards=[0.0, 4.0], truncated=[True, False])]
    batch = in_order(dataclasses.replace(RECIPE, mask_truncated=True), groups)
    assert batch["completion_mask"].tolist() == [[0, 0], [1, 0]]
    assert batch["completion_ids"].tolist() == [[11, 12], [13, 0]]
    assert batch["num_items_in_batch"].item() == 1
    assert batch["advantages"].tolist() == [-2.0, 2.0]


def test_overlong_completions_are_punished_in_their_advantage() -> None:
    overlong = OverlongPenalty(buffer_tokens=2, penalty=4.0, max_completion_length=3)
    recipe = dataclasses.replace(RECIPE, rewards=RewardRecipe(np.ones(1, np.float32), overlong=overlong))
    groups = [rollout_group([[11, 12], [13]], rewards=[1.0, 0.0])]  # 1 - 4 * 0.5 and 0
    assert in_order(recipe, groups)["advantages"].tolist() == [-0.5, 0.5]
    assert recipe.advantages_of(groups).tolist() == [-0.5, 0.5]


def test_the_baseline_and_the_aggregation_reach_the_advantages() -> None:
    groups = [rollout_group([[11], [12]], rewards=[0.0, 4.0])]
    assert dataclasses.replace(RECIPE, baseline="leave_one_out").advantages_of(groups).tolist() == [-4.0, 4.0]
    recipe = dataclasses.replace(RECIPE, rewards=RewardRecipe(np.ones(1, np.float32), "normalize_then_sum"))
    assert recipe.advantages_of(groups).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-3)


def test_unscored_tokens_stay_nan_where_they_are() -> None:
    batch = in_order(RECIPE, [rollout_group([[11, 12], [13]], logprobs=[[-1.0, math.nan], [-2.0]])])
    assert batch["sampling_per_token_logps"].isnan().tolist() == [[False, True], [False, False]]


def test_advantages_are_of_the_whole_step_under_batch_scaling() -> None:
    groups = [rollout_group([[11], [12]], rewards=r) for r in ([0.0, 1.0], [5.0, 9.0])]
    recipe = dataclasses.replace(RECIPE, scale_rewards="batch", micro_batch_size=2)
    actual = torch.cat([batch["advantages"] for batch in recipe.tensors(groups, step=0)])
    rewards = torch.tensor([[0.0], [1.0], [5.0], [9.0]])
    expected = advantages(rewards, torch.ones(1), 2, scale_rewards="batch")
    torch.testing.assert_close(actual, expected[recipe.row_order(2, step=0).tolist()])


def test_tensors_do_not_share_memory_with_the_groups() -> None:
    group = rollout_group([[11], [12]])
    [batch] = RECIPE.tensors([group], step=0)
    batch["completion_ids"] += 1
    batch["sampling_per_token_logps"] += 1
    assert group.completion_ids.tolist() == [11, 12]
    assert group.logprobs.tolist() == pytest.approx([-0.1, -0.2])


# The order of the rows.


def test_the_order_is_a_function_of_seed_and_step() -> None:
    recipe = dataclasses.replace(RECIPE, num_generations=8)
    order = recipe.row_order(16, step=3).tolist()
    assert sorted(order) == list(range(128))
    assert order == recipe.row_order(16, step=3).tolist()
    assert order != recipe.row_order(16, step=4).tolist()
    assert order != dataclasses.replace(recipe, seed=1).row_order(16, step=3).tolist()


@given(st.integers(2, 6), st.integers(1, 9), st.integers(0, 1000))
def test_no_micro_batch_is_all_one_prompt(num_generations: int, num_groups: int, step: int) -> None:
    recipe = dataclasses.replace(RECIPE, num_generations=num_generations)
    prompts = recipe.row_order(num_groups, step) // num_generations
    for size in range(1, len(prompts) + 1):
        for start in range(len(prompts) - size + 1):
            assert len(set(prompts[start : start + size].tolist())) == min(size, num_groups)


# Partial batches.


def test_what_a_partial_batch_lacks_is_made_up_by_narrow_rows_that_count_nowhere() -> None:
    group = rollout_group([[11, 12, 13], [14]], prompt=[1, 2], rewards=[0.0, 4.0])
    recipe = dataclasses.replace(RECIPE, num_completions=8, micro_batch_size=2)
    first, *others = recipe.tensors([group], step=0)
    assert first["completion_mask"].sum() == 4
    assert len(others) == 3
    for batch in others:
        assert batch["prompt_ids"].shape == batch["completion_ids"].shape == (2, 1)
        assert batch["prompt_mask"].tolist() == [[1], [1]], "a row that attends to nothing is NaN in some kernels"
        assert batch["completion_mask"].tolist() == [[0], [0]]
        assert batch["advantages"].tolist() == [0.0, 0.0]
        assert batch["num_items_in_batch"] == first["num_items_in_batch"] == 4
        assert {name: tensor.dtype for name, tensor in batch.items()} == {n: t.dtype for n, t in first.items()}


completion_lists = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=2, max_size=2)
group_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), completion_lists), min_size=1, max_size=5
)


@given(group_lists, st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_no_token_is_lost_moved_or_invented(
    contents: list[tuple[list[int], list[list[int]]]], micro_batch_size: int, step: int
) -> None:
    """Read back through the masks: no holes, no ends cut off, whatever stands beside what, in full and partial batches."""
    groups = [rollout_group(completions, prompt=prompt) for prompt, completions in contents]
    recipe = dataclasses.replace(RECIPE, num_completions=12, micro_batch_size=micro_batch_size)
    batches = recipe.tensors(groups, step)
    assert [len(batch["advantages"]) for batch in batches] == [micro_batch_size] * (12 // micro_batch_size)
    read = []
    for batch in batches:
        for i in range(micro_batch_size):
            prompt_mask, mask = batch["prompt_mask"][i].bool(), batch["completion_mask"][i].bool()
            assert prompt_mask.int().diff().ge(0).all(), "left-padded, without holes"
            assert mask.int().diff().le(0).all(), "right-padded, without holes"
            assert (batch["prompt_ids"][i][~prompt_mask] == PAD).all()
            assert (batch["completion_ids"][i][~mask] == PAD).all()
            if mask.any():
                read.append((batch["prompt_ids"][i][prompt_mask].tolist(), batch["completion_ids"][i][mask].tolist()))
        assert batch["prompt_mask"].any(0).all()
        assert batch["completion_mask"].any(0).all() or batch["completion_mask"].shape[1] == 1, "nothing but padding"
    assert sorted(read) == sorted((prompt, ids) for prompt, completions in contents for ids in completions)
