"""The correction inside the loss: which way every token is pushed, and what masks and clips take out."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from consumer.learn.importance import PRESETS, Correction
from consumer.learn.loss import _vespo_weights
from protocol.config.trainer_keys import CHOICES
from tests.unit.consumer.trl_reference import GRPOTrainer, inputs_of_logprobs, loss_of_logprobs, loss_options

NAN = math.nan
ADVANTAGES = torch.tensor([1.0, -1.0])
CURRENT = torch.tensor([[-1.0, -0.5, -2.0, -0.3], [-1.0, -0.5, -2.0, -0.3]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])

pytestmark = pytest.mark.usefixtures("float64")


def gradient(
    correction: Correction | str, ratio: list[list[float]], loss_type: str = "dapo", **options: Any
) -> torch.Tensor:
    """Of the loss with respect to the current log-probs. A step descends: negative is pushed up."""
    behaviour = CURRENT - torch.tensor(ratio).log()
    preset = PRESETS[correction] if isinstance(correction, str) else correction
    inputs = inputs_of_logprobs(behaviour, ADVANTAGES, MASK)
    return loss_of_logprobs(loss_options(loss_type=loss_type, **options), preset, CURRENT, inputs)[1]


@pytest.mark.parametrize("loss_type", CHOICES["loss_type"])
@pytest.mark.parametrize("preset", PRESETS)
def test_good_completions_are_pushed_up_and_bad_ones_down(preset: str, loss_type: str) -> None:
    push = gradient(preset, [[1.05, 0.98, NAN, 9.0], [0.97, 1.0, 1.04, 1.02]], loss_type)
    assert (push[0, :3] < 0).all()
    assert (push[1] > 0).all()
    assert push[0, 3] == 0


@pytest.mark.parametrize("loss_type", [name for name in CHOICES["loss_type"] if name != "vespo"])
@pytest.mark.parametrize(
    ("preset", "changes", "zero"),
    [
        ("token_mask", {}, [[0, 1, 0, 1], [0, 0, 1, 0]]),
        ("icepop", {}, [[0, 0, 0, 1], [0, 0, 1, 0]]),
        ("sequence_mask", {}, [[1, 1, 1, 1], [0, 0, 0, 0]]),
        ("geometric_mask", {}, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ("none", {"token_veto": 0.3}, [[0, 0, 0, 1], [1, 1, 1, 1]]),
        ("none", {"probability_difference_max": 0.3}, [[0, 1, 0, 1], [0, 0, 1, 0]]),
    ],
)
def test_masked_tokens_have_no_gradient_and_no_others(
    preset: str, changes: dict[str, float], zero: list[list[int]], loss_type: str
) -> None:
    correction = dataclasses.replace(PRESETS[preset], **changes)
    push = gradient(correction, [[1.2, 4.0, NAN, 1.0], [1.5, 1.2, 0.2, 1.0]], loss_type)
    assert (push == 0).int().tolist() == zero
    assert push.isfinite().all()


def test_a_token_masked_under_vespo_takes_its_completion_with_it() -> None:
    """VESPO weighs completions by the product of their factors; TRL takes the logarithm of the 0 to be that of 1e-8."""
    push = gradient("token_mask", [[1.2, 4.0, 1.0, 1.0], [1.05, 1.0, 0.98, 1.0]], "vespo")
    assert push[0].abs().max() < 1e-9
    assert (push[1] > 0).all()


def test_vespo_weighs_completions_as_trl_does_however_far_they_moved() -> None:
    """A token counts at most e^20 times, and a completion; no ratio of a sum is lost to another one's bound."""
    moved = torch.tensor([[-25.0, 19.0, 9.0], [-25.0, 19.0, 9.0], [24.0, -19.5, 9.0], [1.0, -0.5, 9.0]])
    mask = torch.tensor([[1, 1, 0]] * 4)
    factor = torch.tensor([[1.0, 3.0, 1.0], [0.0, 0.5, 1.0], [1.0, 1.0, 1.0], [0.5, 2.0, 1.0]])
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [0.0]])
    options = loss_options(loss_type="vespo")
    names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    expected = GRPOTrainer.get_gamma_weights(
        advantages, moved, mask, factor, *(getattr(options, name) for name in names)
    )
    torch.testing.assert_close(_vespo_weights(options, advantages, moved * mask, factor), expected)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo"])
def test_a_gradient_is_proportional_to_its_factor(loss_type: str) -> None:
    plain = gradient("none", [[1.0] * 4] * 2, loss_type)
    push = gradient("token_truncate", [[2.0, 0.5, 9.0, 9.0], [1.0, NAN, 0.25, 4.0]], loss_type)
    torch.testing.assert_close(
        push / plain, torch.tensor([[2.0, 0.5, 3.0, NAN], [1.0, 1.0, 0.25, 3.0]]), equal_nan=True
    )


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("preset", ["none", "token_truncate", "geometric_truncate"])
def test_the_clip_binds_on_the_right_side_for_both_signs_of_the_advantage(preset: str, loss_type: str) -> None:
    """A peer's was inverted for A < 0. In a second update, π / p of 1.5, 0.5 and 1.1 beside a clip at 0.8 and 1.2."""
    old = CURRENT - torch.tensor([1.5, 0.5, 1.1, 1.0]).log()
    behaviour = old - 0.01
    inputs = inputs_of_logprobs(behaviour, ADVANTAGES, MASK, old_per_token_logps=old)
    _, push = loss_of_logprobs(loss_options(loss_type=loss_type), PRESETS[preset], CURRENT, inputs)
    assert (push[0] < 0).tolist() == [False, True, True, False], (
        "A > 0: no further up, but back from below; one is padding"
    )
    assert (push[1] > 0).tolist() == [True, False, True, True], "A < 0: no further down, but back from above"
    assert push[0, 0] == push[1, 1] == 0


def test_dppo_looks_at_the_current_policy_and_the_sampler() -> None:
    """In a second update: p is at the sampler's, π has moved. π = 0.37, 0.61 and 0.14 against 0.22, 0.25 and 0.5."""
    correction = dataclasses.replace(PRESETS["token_truncate"], probability_difference_max=0.2)
    options = loss_options(loss_type="cispo")  # does not clip these
    behaviour = torch.tensor([[0.22, 0.25, 0.5, 0.7], [0.22, 0.25, 0.5, 0.7]]).log()
    inputs = inputs_of_logprobs(behaviour, ADVANTAGES, MASK, old_per_token_logps=behaviour)
    _, push = loss_of_logprobs(options, correction, CURRENT, inputs)
    assert (push == 0).tolist() == [[False, True, False, True], [False, False, True, False]]


@pytest.mark.parametrize("preset", ["none", "token_truncate", "sequence_mask"])
def test_the_off_policy_mask_drops_bad_completions_that_are_far_from_the_sampler(preset: str) -> None:
    """DeepSeek-V3.2's: mean log b - log π above the threshold and A < 0."""
    correction = dataclasses.replace(PRESETS[preset], ratio_min=0.0)
    push = gradient(correction, [[0.4] * 4] * 2, off_policy_mask_threshold=0.5)  # log b - log π = 0.92
    assert (push[0, :3] < 0).all()
    assert (push[1] == 0).all()
    assert (gradient(correction, [[0.7] * 4] * 2, off_policy_mask_threshold=0.5)[1] > 0).all()


@pytest.mark.parametrize(
    ("second", "dropped"), [([NAN, 1.0, 1.0, 1.0], False), ([NAN, 0.1, 0.1, 0.1], True), ([NAN] * 4, False)]
)
def test_an_unscored_token_is_no_evidence_for_the_off_policy_mask(second: list[float], dropped: bool) -> None:
    push = gradient("token_truncate", [[NAN, 1.0, 1.0, 1.0], second], off_policy_mask_threshold=0.5)
    assert (push[1] == 0).all() if dropped else (push[1] > 0).all()
    assert (push[0, :3] < 0).all()
