"""Numbers of micro-batches become those of their step."""

import math
from typing import Any

import pytest
import torch

from consumer.learn.importance import Correction, importance_factors
from consumer.learn.loss import ACTING_ENTROPY, EntropyThreshold, Pass, metrics_of_step, part_of_loss, values_of
from consumer.learn.micro_batches import Places
from consumer.learn.statistics import Summary, merged, over_ranks
from consumer.ranks.exchange import ALONE
from tests.unit.consumer.trl_reference import inputs_of_logprobs, loss_options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_cut_is_at_an_entropy_and_not_at_its_rounding(dtype: torch.dtype) -> None:
    cut = EntropyThreshold.at(torch.tensor([0.3, 0.2, 0.1], dtype=dtype), 0.5)
    assert cut.num_tokens == 2


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 2, 11, 1000])
def test_the_cut_is_where_torch_has_the_quantile(quantile: float, count: int) -> None:
    entropies = torch.rand(count, dtype=torch.float64)
    cut = EntropyThreshold.at(entropies, quantile)
    torch.testing.assert_close(cut.entropy, torch.quantile(entropies, quantile), rtol=0, atol=1e-12)
    assert cut.num_tokens == (entropies >= torch.quantile(entropies, quantile) - 1e-12).sum()


@pytest.mark.long
def test_a_step_of_more_tokens_than_torch_takes_a_quantile_of() -> None:
    entropies = torch.arange(2**24 + 1, dtype=torch.float32)
    assert EntropyThreshold.at(entropies.flip(0), 0.5) == (2**23, 2**23 + 1)


def test_a_step_without_a_token_in_the_loss_has_no_cut() -> None:
    assert EntropyThreshold.at(torch.zeros(0), 0.5) == (math.inf, 0)


def test_metrics_by_hand() -> None:
    first = {"kl": [1.0, 1.0, 1.0], "clip_ratio/low_min": [0.1], "clip_ratio/high_max": [0.2], "policy_loss": [1.0]}
    second = {"kl": [5.0], "clip_ratio/low_min": [0.0], "clip_ratio/high_max": [math.nan], "policy_loss": [5.0]}
    first, second = first | {"aux_loss": [], "entropy": []}, second | {"aux_loss": [2.0], "entropy": []}
    parts = [Summary.of({name: torch.tensor(values) for name, values in part.items()}) for part in (first, second)]
    numbers, _ = over_ranks(merged(parts), ALONE)
    assert metrics_of_step(numbers) == pytest.approx({
        "kl": 2.0, "clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.2, "policy_loss": 6.0, "aux_loss": 2.0
    })  # fmt: skip


def seen(**options: Any) -> dict[str, list[float]]:
    """Of two completions of two tokens and one, in a second update: π / p of 2, 0.5 and 0.5."""
    current = torch.full((2, 2), -1.0)
    old = current - torch.tensor([[2.0, 0.5], [0.5, 9.0]]).log()
    batch = inputs_of_logprobs(
        current, torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]]), old_per_token_logps=old
    )
    factors = importance_factors(
        Correction("none", "truncate", 0.0, math.inf), current=current, proximal=old, behaviour=current,
        advantages=batch["advantages"], mask=batch["completion_mask"],
    )  # fmt: skip
    found = part_of_loss(
        loss_options(**options),
        batch,
        Pass(current, torch.arange(4.0).view(2, 2)),
        factors,
        threshold=EntropyThreshold(1.0, torch.tensor(2)),
    )[1]
    values = values_of(found, Places.of(batch["completion_mask"]), current.shape)
    return {name: each.tolist() for name, each in values.items()}


def test_what_metrics_are_made_of() -> None:
    clipped = seen(loss_type="grpo")
    assert clipped["entropy"] == [0.0, 1.0, 2.0]
    assert clipped[ACTING_ENTROPY] == pytest.approx([math.nan, 1.0, 2.0], nan_ok=True)
    assert clipped["clip_ratio/high_mean"] == [True, False, False]
    assert clipped["clip_ratio/low_mean"] == [False, False, True]
    assert clipped["clip_ratio/region_mean"] == [True, False, True]
    assert clipped["clip_ratio/high_max"] == [0.5, 0.0]
    assert clipped["clip_ratio/low_min"] == [0.0, 1.0]
    assert seen(loss_type="cispo")["cispo_clip_ratio"] == [True, True, False]


def test_what_has_one_number_for_each_completion() -> None:
    rows = seen(loss_type="grpo", importance_sampling_level="sequence")  # 1 and 0.5
    assert rows["clip_ratio/low_mean"] == [False, True]
    assert rows["clip_ratio/region_mean"] == [False, True]
    assert len(seen(loss_type="vespo")["vespo/phi_seq_mean"]) == 2
