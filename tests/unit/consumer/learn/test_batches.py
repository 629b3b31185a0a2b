"""Groups become tensors: cut into micro-batches, each padded to its own longest, log-probs beside their tokens."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumer.learn.importance import PRESETS, importance_factors
from consumer.learn.micro_batches import (
    BatchRecipe,
    MicroBatch,
    joined_bytes,
    loss_mask,
    on_device,
    view_of,
)
from replay.groups import RolloutGroup
from replay.rewards import OverlongPenalty, RewardRecipe
from tests.unit.consumer.builders import rollout_group

PAD = 0
RECIPE = BatchRecipe(
    rewards=RewardRecipe(np.ones(1, np.float32), scale_rewards="none"),
    num_generations=2,
    groups_per_step=1,
    max_tokens=1000,
    tree=False,
    only_advantages=False,
    keeps_all_rows=False,
    pad_token_id=PAD,
    mask_truncated=False,
    seed=0,
)


def rows_in_order(groups: list[RolloutGroup], **changes: Any) -> MicroBatch:
    """The only micro-batch of these groups, its rows in the order of their first tokens."""
    [batch] = dataclasses.replace(RECIPE, **changes).tensors(groups)
    num_items = batch.pop("num_items_in_batch")
    order = batch["completion_ids"][:, 0].argsort()
    return {name: tensor[order] for name, tensor in batch.items()} | {"num_items_in_batch": num_items}


def test_every_cell_of_a_batch() -> None:
    groups = [
        rollout_group([[11, 12, 13], [14]], prompt=[1, 2, 3], rewards=[0.0, 1.0], truncated=[True, False]),
        rollout_group([[15, 16], [17, 18]], prompt=[4], rewards=[1.0, 5.0]),
    ]
    batch = rows_in_order(groups)
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
        "row": torch.int64,
        "prompt_ids": torch.int64,
        "prompt_mask": torch.int64,
        "completion_ids": torch.int64,
        "completion_mask": torch.int64,
        "sampling_per_token_logps": torch.float32,
        "advantages": torch.float32,
        "num_items_in_batch": torch.int64,
    }


def test_results_of_tools_are_masked_and_each_record_has_the_advantage_of_its_episode() -> None:
    """Episode 0 was forked: 12 and 13, and in its second record 14 and 15, were not sampled."""
    forked = rollout_group(
        [[11, 12, 13], [14, 15, 16, 17], [18]],
        sampled=[[True, False, False], [False, False, True, True], [True]],
        episodes=[0, 0, 1],
        rewards=[0.0, 1.0],
    )
    batch = rows_in_order([forked])
    assert batch["completion_ids"].tolist() == [[11, 12, 13, 0], [14, 15, 16, 17], [18, 0, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["tool_mask"].tolist() == [[1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]
    assert loss_mask(batch).tolist() == [[1, 0, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]]
    assert batch["sampling_per_token_logps"].flatten()[[1, 2, 4, 5]].tolist() == [0, 0, 0, 0]
    assert batch["advantages"].tolist() == [-0.5, -0.5, 0.5]
    assert batch["num_items_in_batch"].item() == 4
    cut = rows_in_order([dataclasses.replace(forked, truncated=np.array([True, True, False]))], mask_truncated=True)
    assert cut["completion_ids"].tolist() == [[18]]
    assert cut["num_items_in_batch"].item() == 1


def test_a_completion_that_two_policies_sampled_has_the_ratio_of_each_token_to_its_own() -> None:
    """Version 3 gave the first token 0.5, version 4 the second 0.2; the policy that trains gives them 0.25 and 0.4."""
    group = rollout_group(
        [[11, 12], [13]],
        logprobs=[[math.log(0.5), math.log(0.2)], [math.log(0.3)]],
        version=3,
        token_versions=[3, 4, 4],
    )
    batch = rows_in_order([group])
    current = torch.tensor([[0.25, 0.4], [0.3, 1.0]]).log()
    factors = importance_factors(
        PRESETS["token_truncate"],
        current=current,
        proximal=current,
        behaviour=batch["sampling_per_token_logps"],
        advantages=batch["advantages"],
        mask=batch["completion_mask"],
    )
    torch.testing.assert_close(factors.policy, torch.tensor([[0.5, 2.0], [1.0, 1.0]]))


def test_micro_batches_are_padded_to_their_own_longest_and_share_the_count_of_tokens() -> None:
    groups = [rollout_group([[11], [12]], prompt=[1]), rollout_group([[13, 14, 15, 16], [17]], prompt=[2, 3, 4])]
    batches = dataclasses.replace(RECIPE, max_tokens=7).tensors(groups)
    assert [batch["completion_ids"].tolist() for batch in batches] == [[[13, 14, 15, 16]], [[17]], [[11], [12]]]
    assert [batch["prompt_ids"].tolist() for batch in batches] == [[[2, 3, 4]], [[2, 3, 4]], [[1], [1]]]
    assert [batch["num_items_in_batch"].item() for batch in batches] == [7] * 3


def test_passes_over_trees_have_the_tokens_that_go_through_the_model() -> None:
    """The prompts of 6 tokens count once in each pass; a row above the limit has a pass of its own."""
    groups = [
        rollout_group([[11], [12, 12]], prompt=[2] * 6, lease_id="a"),
        rollout_group([[13] * 9, [14]], prompt=[1] * 6, lease_id="b"),
        rollout_group([[15], [16]], prompt=[2] * 6, lease_id="c"),
    ]
    recipe = dataclasses.replace(RECIPE, tree=True, max_tokens=11)
    assert [batch["completion_ids"][:, 0].tolist() for batch in recipe.tensors(groups)] == [
        [13],
        [11, 12, 15, 16],
        [14],
    ]
    whole = dataclasses.replace(recipe, max_tokens=27).tensors(groups)
    assert [len(batch["row"]) for batch in whole] == [6]


def test_ranks_in_step_have_as_many_micro_batches_and_what_fills_them_up_is_not_in_the_loss() -> None:
    groups = [
        rollout_group([[11], [12]], prompt=[1], rewards=[0.0, 2.0]),
        rollout_group([[13, 14], [15]], prompt=[2, 3]),
    ]
    ranks = [dataclasses.replace(RECIPE, max_tokens=2, rank=rank, world=3, in_step=True) for rank in range(3)]
    found = [recipe.tensors(groups) for recipe in ranks]
    assert [len(batches) for batches in found] == [2, 2, 2]
    in_loss = [[int(loss_mask(batch).sum()) for batch in batches] for batches in found]
    assert sorted(map(sorted, in_loss)) == [[0, 1], [0, 2], [1, 1]]
    filler = next(batch for batches in found for batch in batches if not loss_mask(batch).any())
    assert filler["completion_ids"].tolist() == [[11]]
    assert filler["advantages"].tolist() == [0.0]
    assert {int(batch["num_items_in_batch"]) for batches in found for batch in batches} == {5}


def test_completions_keep_their_advantages_wherever_they_go() -> None:
    groups = [rollout_group([[n], [n + 1, n + 1]], rewards=[0.0, float(n)]) for n in (10, 20)]
    batches = dataclasses.replace(RECIPE, max_tokens=8).tensors(groups)
    assert [batch["completion_ids"][:, 0].tolist() for batch in batches] == [[11, 21], [10, 20]]
    assert [batch["advantages"].tolist() for batch in batches] == [[5.0, 10.0], [-5.0, -10.0]]


def test_masked_truncated_completions_are_left_out_and_not_counted_but_keep_their_reward_in_the_baseline() -> None:
    groups = [rollout_group([[11, 12], [13]], rewards=[0.0, 4.0], truncated=[True, False])]
    batch = rows_in_order(groups, mask_truncated=True)
    assert batch["completion_ids"].tolist() == [[13]]
    assert batch["num_items_in_batch"].item() == 1
    assert batch["advantages"].tolist() == [2.0]


def test_overlong_completions_are_punished_in_their_advantage() -> None:
    overlong = OverlongPenalty(buffer_tokens=2, penalty=4.0, max_completion_length=3)
    groups = [rollout_group([[11, 12], [13]], rewards=[1.0, 0.0])]  # 1 - 4 * 0.5 and 0
    recipe = dataclasses.replace(RECIPE.rewards, overlong=overlong)
    assert rows_in_order(groups, rewards=recipe)["advantages"].tolist() == [-0.5, 0.5]


def test_the_baseline_and_the_aggregation_reach_the_advantages() -> None:
    groups = [rollout_group([[11], [12]], rewards=[0.0, 4.0])]
    left_out = dataclasses.replace(RECIPE.rewards, baseline="leave_one_out")
    assert rows_in_order(groups, rewards=left_out)["advantages"].tolist() == [-4.0, 4.0]
    normalized = rows_in_order(groups, rewards=RewardRecipe(np.ones(1, np.float32), "normalize_then_sum"))
    assert normalized["advantages"].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-3)


def test_unscored_tokens_stay_nan_where_they_are() -> None:
    batch = rows_in_order([rollout_group([[11, 12], [13]], logprobs=[[-1.0, math.nan], [-2.0]])])
    assert batch["sampling_per_token_logps"].isnan().tolist() == [[False, True], [False, False]]


def test_advantages_are_of_the_whole_step_under_batch_scaling() -> None:
    groups = [rollout_group([[11], [12]], rewards=r) for r in ([0.0, 1.0], [5.0, 9.0])]
    rewards = RewardRecipe(np.ones(1, np.float32), scale_rewards="batch")
    recipe = dataclasses.replace(RECIPE, rewards=rewards, max_tokens=6)
    batches = recipe.tensors(groups)
    assert len(batches) == 2
    scale = math.sqrt((3.75**2 + 2.75**2 + 1.25**2 + 5.25**2) / 3) + 1e-4  # of 0, 1, 5, 9 around 3.75
    found = torch.cat([batch["advantages"] for batch in batches]).tolist()
    assert found == pytest.approx([-0.5 / scale, 0.5 / scale, -2 / scale, 2 / scale])


def test_tensors_do_not_share_memory_with_the_groups() -> None:
    group = rollout_group([[11], [12]])
    [batch] = RECIPE.tensors([group])
    batch["completion_ids"] += 1
    batch["sampling_per_token_logps"] += 1
    assert group.completion_ids.tolist() == [11, 12]
    assert group.logprobs.tolist() == pytest.approx([-0.1, -0.2])


# Rows that cannot move the policy.


def test_rows_without_advantage_are_left_out_where_nothing_else_has_a_gradient() -> None:
    groups = [rollout_group([[11], [12, 13], [14]], rewards=[0.0, 1.0, 2.0])]
    recipe = dataclasses.replace(RECIPE, num_generations=3)
    assert len(recipe.tensors(groups)[0]["advantages"]) == 3
    [batch] = dataclasses.replace(recipe, only_advantages=True).tensors(groups)
    assert batch["advantages"].tolist() == [-1.0, 1.0]
    assert batch["num_items_in_batch"] == 4, "the denominator is of all"


def test_a_step_in_which_nothing_counts_is_one_row_that_does_not() -> None:
    groups = [rollout_group([[11, 12], [13]], prompt=[1, 2], truncated=[True, True])]
    [batch] = dataclasses.replace(RECIPE, mask_truncated=True).tensors(groups)
    assert batch["completion_ids"].tolist() == [[13]]
    assert batch["completion_mask"].tolist() == [[0]]
    assert batch["prompt_mask"].tolist() == [[1, 1]], "a row that attends to nothing is NaN in some kernels"
    assert batch["num_items_in_batch"] == 0


completion_lists = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=2, max_size=2)
group_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), completion_lists), min_size=1, max_size=5
)


@pytest.mark.long
@given(group_lists, st.integers(1, 40))
def test_no_token_is_lost_moved_or_invented(contents: list[tuple[list[int], list[list[int]]]], max_tokens: int) -> None:
    """Read back through the masks: no holes, no ends cut off, whatever stands beside what."""
    groups = [rollout_group(completions, prompt=prompt) for prompt, completions in contents]
    read = []
    for batch in dataclasses.replace(RECIPE, max_tokens=max_tokens).tensors(groups):
        for i in range(len(batch["advantages"])):
            prompt_mask, mask = batch["prompt_mask"][i].bool(), batch["completion_mask"][i].bool()
            assert prompt_mask.int().diff().ge(0).all(), "left-padded, without holes"
            assert mask.int().diff().le(0).all(), "right-padded, without holes"
            assert (batch["prompt_ids"][i][~prompt_mask] == PAD).all()
            assert (batch["completion_ids"][i][~mask] == PAD).all()
            read.append((batch["prompt_ids"][i][prompt_mask].tolist(), batch["completion_ids"][i][mask].tolist()))
        assert batch["prompt_mask"].any(0).all()
        assert batch["completion_mask"].any(0).all(), "nothing but padding"
    assert sorted(read) == sorted((prompt, ids) for prompt, completions in contents for ids in completions)


def test_tensors_of_any_type_travel_as_one() -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, dtype=torch.int32),
        "number": torch.tensor(7),
        "matrix": torch.arange(6.0).view(2, 3).t(),
        "starts": torch.tensor([0, 3], dtype=torch.int32),
    }
    data, places = joined_bytes(tensors)
    for name, place in places.items():
        found = view_of(data, tensors[name], place)
        assert (found.dtype, found.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(found, tensors[name])


def test_what_is_on_the_device_is_not_copied() -> None:
    there = torch.ones(2, device="meta")
    found = on_device({"there": there, "here": torch.ones(3)}, torch.device("meta"))
    assert found["there"] is there
    assert (found["here"].device.type, found["here"].shape) == ("meta", (3,))
