"""Groups become tensors: each micro-batch padded to its own longest, log-probs beside their tokens."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumer.advantages import advantages
from consumer.batches import BatchRecipe

from .builders import rollout_group

PAD = 0
RECIPE = BatchRecipe(
    weights=torch.tensor([1.0]),
    num_generations=2,
    micro_batch_size=4,
    pad_token_id=PAD,
    scale_rewards="none",
    aggregation="sum_then_normalize",
    mask_truncated=False,
)


def test_every_cell_of_a_batch() -> None:
    groups = [
        rollout_group([[11, 12, 13], [14]], prompt=[1, 2, 3], rewards=[0.0, 1.0], truncated=[True, False]),
        rollout_group([[15, 16], [17, 18]], prompt=[4], rewards=[1.0, 5.0]),
    ]
    [batch] = RECIPE.tensors(groups)
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
    groups = [
        rollout_group([[11], [12]], prompt=[1]),
        rollout_group([[13, 14, 15, 16], [17]], prompt=[2, 3, 4]),
    ]
    first, second = dataclasses.replace(RECIPE, micro_batch_size=2).tensors(groups)
    assert first["completion_ids"].tolist() == [[11], [12]]
    assert first["prompt_ids"].tolist() == [[1], [1]]
    assert second["completion_ids"].tolist() == [[13, 14, 15, 16], [17, 0, 0, 0]]
    assert second["prompt_ids"].tolist() == [[2, 3, 4], [2, 3, 4]]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 7


def test_a_group_may_be_split_over_micro_batches_and_keeps_its_advantages() -> None:
    batches = dataclasses.replace(RECIPE, micro_batch_size=1).tensors([rollout_group([[11], [12]], rewards=[0.0, 4.0])])
    assert [batch["advantages"].tolist() for batch in batches] == [[-2.0], [2.0]]


def test_truncated_completions_are_masked_whole_and_not_counted_but_keep_their_reward_in_the_baseline() -> None:
    groups = [rollout_group([[11, 12], [13]], rewards=[0.0, 4.0], truncated=[True, False])]
    [batch] = dataclasses.replace(RECIPE, mask_truncated=True).tensors(groups)
    assert batch["completion_mask"].tolist() == [[0, 0], [1, 0]]
    assert batch["completion_ids"].tolist() == [[11, 12], [13, 0]]
    assert batch["num_items_in_batch"].item() == 1
    assert batch["advantages"].tolist() == [-2.0, 2.0]


def test_unscored_tokens_stay_nan_where_they_are() -> None:
    [batch] = RECIPE.tensors([rollout_group([[11, 12], [13]], logprobs=[[-1.0, math.nan], [-2.0]])])
    assert batch["sampling_per_token_logps"].isnan().tolist() == [[False, True], [False, False]]


def test_advantages_are_of_the_whole_step_under_batch_scaling() -> None:
    groups = [rollout_group([[11], [12]], rewards=r) for r in ([0.0, 1.0], [5.0, 9.0])]
    recipe = dataclasses.replace(RECIPE, scale_rewards="batch", micro_batch_size=2)
    actual = torch.cat([batch["advantages"] for batch in recipe.tensors(groups)])
    rewards = torch.tensor([[0.0], [1.0], [5.0], [9.0]])
    torch.testing.assert_close(actual, advantages(rewards, recipe.weights, 2, scale_rewards="batch"))


def test_tensors_do_not_share_memory_with_the_groups() -> None:
    group = rollout_group([[11], [12]])
    [batch] = RECIPE.tensors([group])
    batch["completion_ids"] += 1
    batch["sampling_per_token_logps"] += 1
    assert group.completion_ids.tolist() == [11, 12]
    assert group.logprobs.tolist() == pytest.approx([-0.1, -0.2])


completion_lists = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=2, max_size=2)
group_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), completion_lists), min_size=1, max_size=5
)


@given(group_lists, st.sampled_from([1, 2, 4]))
def test_no_token_is_lost_moved_or_invented(
    contents: list[tuple[list[int], list[list[int]]]], micro_batch_size: int
) -> None:
    """Read back through the masks: no holes, no ends cut off, whatever stands beside what."""
    groups = [rollout_group(completions, prompt=prompt) for prompt, completions in contents]
    batches = dataclasses.replace(RECIPE, micro_batch_size=micro_batch_size).tensors(groups)
    read = []
    for batch in batches:
        for i in range(len(batch["advantages"])):
            prompt_mask, mask = batch["prompt_mask"][i].bool(), batch["completion_mask"][i].bool()
            assert prompt_mask.int().diff().ge(0).all(), "left-padded, without holes"
            assert mask.int().diff().le(0).all(), "right-padded, without holes"
            assert (batch["prompt_ids"][i][~prompt_mask] == PAD).all()
            assert (batch["completion_ids"][i][~mask] == PAD).all()
            read.append((batch["prompt_ids"][i][prompt_mask].tolist(), batch["completion_ids"][i][mask].tolist()))
        assert batch["prompt_mask"].any(0).all()
        assert batch["completion_mask"].any(0).all(), "no column of padding only"
    assert read == [(prompt, ids) for prompt, completions in contents for ids in completions]
