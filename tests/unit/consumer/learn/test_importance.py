"""Importance factors against numbers worked by hand, and what must hold of any of them."""

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumer.learn.importance import PRESETS, Correction, Factors, importance_factors, resolve
from protocol.config.learning import CorrectionSection, Preset

NAN = math.nan


def factors(
    correction: Correction | str,
    ratios: list[list[float]],
    mask: list[list[int]] | None = None,
    *,
    proximal: float = -1.0,
    advantages: list[float] | None = None,
    **changes: Any,
) -> Factors:
    """Of tokens with these ratios p / b, with p = exp(-1). One update per batch: π = p."""
    correction = dataclasses.replace(PRESETS[correction] if isinstance(correction, str) else correction, **changes)
    p = torch.full((len(ratios), len(ratios[0])), proximal)
    return importance_factors(
        correction,
        current=p,
        proximal=p,
        behaviour=p - torch.tensor(ratios).log(),
        advantages=torch.tensor(advantages or [1.0] * len(ratios)),
        mask=torch.ones_like(p) if mask is None else torch.tensor(mask),
    )


# Products 1.5, 0.6, 64 and 1; geometric means 1.1067, 0.7746 (of the two scored tokens), 8 and 1.
RATIOS = [[1.0, 1.5, 4.0, 0.25], [0.6, NAN, 1.0, 9.0], [8.0, 8.0, 9.0, 9.0], [4.0, 0.25, 1.0, 1.0]]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
GEO = 1.5**0.25, 0.6**0.5
ONES = [1.0] * 4


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("none", [ONES, ONES, ONES, ONES]),
        ("token_truncate", [[1, 1.5, 3, 0.25], [0.6, 1, 1, 1], [3, 3, 1, 1], [3, 0.25, 1, 1]]),
        ("token_mask", [[1, 1.5, 0, 0], [0.6, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]),
        ("icepop", [[1, 1.5, 4, 0], [0.6, 1, 1, 1], [0, 0, 1, 1], [4, 0, 1, 1]]),
        ("sequence_truncate", [[1.5] * 4, [0.6, 0.6, 0.6, 1], [3, 3, 1, 1], ONES]),
        ("sequence_mask", [[1.5] * 4, [0.6, 0.6, 0.6, 1], [0, 0, 1, 1], ONES]),
        ("geometric_truncate", [[GEO[0]] * 4, [GEO[1]] * 3 + [1], [2, 2, 1, 1], ONES]),
        ("geometric_mask", [[0] * 4, [0, 0, 0, 1], [0, 0, 1, 1], ONES]),
    ],
)
def test_every_preset_by_hand(preset: str, expected: list[list[float]]) -> None:
    torch.testing.assert_close(factors(preset, RATIOS, MASK).policy, torch.tensor(expected))


def test_the_presets_are_those_of_the_schema() -> None:
    assert set(PRESETS) == set(get_args(Preset))
    default = CorrectionSection()
    assert resolve(default) == PRESETS["token_truncate"] == Correction("token", "truncate", 0.0, 3.0)
    for preset in PRESETS.values():
        assert preset.ratio_min <= 1 <= preset.ratio_max, "what is on-policy is inside"


def test_bounds_and_masks_of_the_configuration() -> None:
    section = CorrectionSection(preset="icepop", ratio_max=2, token_veto=1e-4, probability_difference_max=0.2)
    assert resolve(section) == Correction("token", "mask", 0.5, 2.0, 1e-4, 0.2)
    section = CorrectionSection(preset="geometric_truncate", ratio_min=0.0)
    assert resolve(section) == Correction("geometric", "truncate", 0.0, 2.0)


def test_bounds_that_a_truncation_takes_from_both_sides() -> None:
    result = factors("token_truncate", [[0.25, 0.75, 1.5, 4.0]], ratio_min=0.5, ratio_max=2.0)
    torch.testing.assert_close(result.policy, torch.tensor([[0.5, 0.75, 1.5, 2.0]]))
    result = factors("sequence_truncate", [[0.25, 1.0], [2.0, 2.0]], ratio_min=0.5)
    torch.testing.assert_close(result.policy, torch.tensor([[0.5, 0.5], [3.0, 3.0]]))


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.action == "mask"])
def test_mask_modes_do_not_clamp_again_what_they_masked(preset: str) -> None:
    """A peer's did: zero came back as the lower bound and nothing was masked."""
    result = factors(preset, [[9.0, 9.0], [0.01, 0.01], [1.05, 1.05]], ratio_min=0.9, ratio_max=1.2)
    torch.testing.assert_close(result.policy[:2], torch.zeros(2, 2))
    inside = 1.05**2 if PRESETS[preset].level == "sequence" else 1.05
    torch.testing.assert_close(result.policy[2], torch.full((2,), inside), msg="what is inside keeps its ratio")


def test_a_sequence_ratio_explodes_with_length_and_a_geometric_mean_does_not() -> None:
    """A completion of 400 tokens, each 2 % more likely now: e^8 = 2981 times as likely as a whole."""
    short, long = ([[1.02] * length] for length in (4, 400))
    product = [factors("sequence_truncate", ratios).ratio.item() for ratios in (short, long)]
    assert product == pytest.approx([1.02**4, 1.02**400], rel=1e-3)
    assert product[1] > 2500
    assert factors("sequence_mask", short).policy.min() > 0
    assert factors("sequence_mask", long).policy.max() == 0, "masked for its length"
    mean = [factors("geometric_mask", ratios).policy for ratios in (short, long)]
    assert mean[0][0, 0].item() == pytest.approx(mean[1][0, 0].item(), rel=1e-5) == pytest.approx(1.02, rel=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_overflow_is_caught(preset: str) -> None:
    result = importance_factors(
        dataclasses.replace(PRESETS[preset], ratio_max=math.inf),
        current=torch.zeros(2, 30),
        proximal=torch.tensor([[0.0], [-60.0]]).expand(2, 30),
        behaviour=torch.tensor([[-60.0], [0.0]]).expand(2, 30),
        advantages=torch.ones(2),
        mask=torch.ones(2, 30),
    )
    assert result.policy.isfinite().all()
    assert (result.policy >= 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_that_are_masked_or_unscored_have_factor_one(preset: str) -> None:
    result = factors(preset, [[NAN, NAN], [9.0, NAN]], [[1, 1], [0, 0]], token_veto=0.1, probability_difference_max=0.1)
    assert result.policy.tolist() == result.kl.tolist() == [[1, 1], [1, 1]]


def test_a_nan_of_the_trainer_in_padding_stays_out() -> None:
    p = torch.tensor([[NAN, -1.0]])
    result = importance_factors(
        PRESETS["sequence_truncate"],
        current=p,
        proximal=p,
        behaviour=torch.full((1, 2), -1.0),
        advantages=torch.ones(1),
        mask=torch.tensor([[0, 1]]),
    )
    assert result.policy.tolist() == [[1.0, 1.0]]


def test_no_gradient_flows_through_the_factors() -> None:
    p = torch.tensor([[-1.0]], requires_grad=True)
    result = importance_factors(
        dataclasses.replace(PRESETS["token_truncate"], probability_difference_max=0.1),
        current=p,
        proximal=p,
        behaviour=torch.tensor([[-2.0]]),
        advantages=torch.ones(1),
        mask=torch.ones(1, 1),
    )
    assert not result.policy.requires_grad
    assert not result.kl.requires_grad


# Masks on top.


@pytest.mark.parametrize(("preset", "kept"), [("none", 1.0), ("token_truncate", 2.0), ("geometric_truncate", 2**0.5)])
def test_a_veto_masks_the_whole_completion(preset: str, kept: float) -> None:
    ratios = [[2.0, 1e-5, 2.0], [2.0, 1.0, 1e-5], [2.0, 2e-4, 2.0], [2.0, NAN, 1.0]]
    result = factors(preset, ratios, [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]], token_veto=1e-4)
    assert result.vetoed.tolist() == [True, False, False, False], "padding and unscored tokens veto nothing"
    assert result.policy[0].tolist() == [0, 0, 0]
    assert result.policy[1, 0].item() == pytest.approx(kept)
    assert (result.policy[1:] > 0).all()


@pytest.mark.parametrize(
    ("advantage", "now", "then", "masked"),
    [
        (1.0, 0.6, 0.3, True),  # up by 0.3, and would go further up
        (1.0, 0.45, 0.3, False),  # within the bound
        (1.0, 0.3, 0.6, False),  # comes back
        (-1.0, 0.3, 0.6, True),
        (-1.0, 0.45, 0.6, False),
        (-1.0, 0.6, 0.3, False),
        (0.0, 0.6, 0.3, False),
        (1.0, 0.6, NAN, False),
    ],
)
def test_dppo_by_hand(advantage: float, now: float, then: float, masked: bool) -> None:
    """The bound is 0.2. The ratio of a rare token may be large: 0.01 to 0.1 is tenfold and inside."""
    current = torch.tensor([[now, 0.1]]).log()
    result = importance_factors(
        dataclasses.replace(PRESETS["none"], probability_difference_max=0.2),
        current=current,
        proximal=torch.full((1, 2), -9.0),  # the region is around the sampler, the policy in it the current one
        behaviour=torch.tensor([[then, 0.01]]).log(),
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 2),
    )
    assert result.moved.tolist() == [[masked, False]]
    assert result.policy.tolist() == [[0.0 if masked else 1.0, 1.0]]


def test_masks_stack() -> None:
    p = torch.tensor([[0.6, 0.2, 0.2, 0.2], [0.6, 0.2, 0.2, 0.2]]).log()
    behaviour = torch.tensor([[0.3, 0.2, 0.02, 0.1], [0.5, 0.2, 0.2, 0.9]]).log()
    correction = dataclasses.replace(
        PRESETS["icepop"], token_veto=0.3, probability_difference_max=0.25, ratio_min=0.1
    )  # ratios 2, 1, 10, 2 and 1.2, 1, 1, 0.22
    result = importance_factors(
        correction, current=p, proximal=p, behaviour=behaviour, advantages=torch.ones(2), mask=torch.ones(2, 4)
    )
    torch.testing.assert_close(result.policy, torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0]]))
    assert result.moved.tolist() == [[True, False, False, False], [False] * 4]
    assert result.outside.tolist() == [[False, False, True, False], [False] * 4]
    assert result.vetoed.tolist() == [False, True]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("icepop", [0.5, 1.0, 5.0]),
        ("token_truncate", [0.25, 1.0, 3.0]),
        ("sequence_mask", [2.25] * 3),
        ("none", [1.0] * 3),
    ],
)
def test_the_factor_of_the_kl_is_the_ratio_truncated_and_never_masked(preset: str, expected: list[float]) -> None:
    result = factors(preset, [[0.25, 1.0, 9.0]], token_veto=0.5, probability_difference_max=0.01)
    assert result.policy.tolist() == [[0, 0, 0]]
    torch.testing.assert_close(result.kl, torch.tensor([expected]))


# What holds of any batch.

corrections = st.builds(
    Correction,
    level=st.sampled_from(["none", "token", "sequence", "geometric"]),
    action=st.sampled_from(["truncate", "mask"]),
    ratio_min=st.floats(0, 1),
    ratio_max=st.floats(1, 10),
    token_veto=st.none() | st.floats(1e-4, 0.5),
    probability_difference_max=st.none() | st.floats(0.05, 0.9),
)
logprob = st.floats(-12, 0, width=32)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = shape[0] * shape[1]

    def matrix(values: st.SearchStrategy[float]) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)

    return {
        "current": matrix(logprob),
        "proximal": matrix(logprob),
        "behaviour": matrix(logprob | st.just(NAN)),
        "advantages": torch.tensor(draw(st.lists(st.floats(-2, 2, width=32), min_size=shape[0], max_size=shape[0]))),
        "mask": matrix(st.sampled_from([0, 1])),
    }


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(corrections, batches())
def test_factors_are_zero_or_within_the_bounds(correction: Correction, batch: dict[str, torch.Tensor]) -> None:
    result = importance_factors(correction, **batch)
    low, high = torch.tensor([correction.ratio_min, correction.ratio_max])
    inside = (result.policy >= low) & (result.policy <= high)
    assert (inside | (result.policy == 0) | ~result.in_loss).all()
    assert ((result.kl >= low) & (result.kl <= high) | ~result.in_loss).all()
    assert (result.policy[~result.in_loss] == 1).all()
    if correction.action == "truncate":
        assert (inside | result.vetoed[:, None] | result.moved | ~result.in_loss).all()
    else:
        kept = (result.policy != 0) & result.in_loss
        torch.testing.assert_close(result.policy[kept], result.ratio.expand_as(kept)[kept], rtol=0, atol=0)
        assert not (kept & result.outside).any()


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(corrections, batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_tokens_does_not_matter(
    correction: Correction, batch: dict[str, torch.Tensor], draw: Any
) -> None:
    rows, columns = batch["mask"].shape
    i = torch.tensor(draw.sample(range(rows), rows))
    j = torch.tensor(draw.sample(range(columns), columns))
    permuted = {name: x[i] if x.dim() == 1 else x[i][:, j] for name, x in batch.items()}
    expected, actual = importance_factors(correction, **batch), importance_factors(correction, **permuted)
    by_token = expected.ratio.shape == expected.policy.shape
    # A sum in another order may round to the other side of a bound; the ratio is what must agree.
    torch.testing.assert_close(
        actual.ratio, expected.ratio[i][:, j] if by_token else expected.ratio[i], rtol=1e-4, atol=0
    )
    assert torch.equal(actual.vetoed, expected.vetoed[i])
    assert torch.equal(actual.moved, expected.moved[i][:, j])


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(corrections, batches(), batches())
def test_masked_positions_do_not_matter(
    correction: Correction, batch: dict[str, torch.Tensor], noise: dict[str, torch.Tensor]
) -> None:
    other = dict(batch)
    for name in ("current", "proximal", "behaviour"):
        filler = noise[name].flatten()[0]
        other[name] = torch.where(batch["mask"].bool(), batch[name], filler)
    expected, actual = importance_factors(correction, **batch), importance_factors(correction, **other)
    assert torch.equal(actual.policy, expected.policy)
    assert torch.equal(actual.kl, expected.kl)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(corrections, batches())
def test_on_policy_every_factor_is_one(correction: Correction, batch: dict[str, torch.Tensor]) -> None:
    batch["current"] = batch["behaviour"] = batch["proximal"]
    result = importance_factors(correction, **batch)
    assert (result.policy == 1).all()
    assert (result.kl == 1).all()


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(2, 5))
def test_a_geometric_mean_does_not_depend_on_length(batch: dict[str, torch.Tensor], times: int) -> None:
    """The same tokens several times over."""
    correction = Correction("geometric", "truncate", 0.0, math.inf)
    repeated = {name: x if x.dim() == 1 else x.repeat(1, times) for name, x in batch.items()}
    expected, actual = importance_factors(correction, **batch), importance_factors(correction, **repeated)
    torch.testing.assert_close(actual.ratio, expected.ratio, rtol=1e-4, atol=0)
