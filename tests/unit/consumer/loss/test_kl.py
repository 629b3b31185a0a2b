"""The KL term that the correction adds to TRL's: by hand, against the true gradient, and inside every loss type, in float64."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.loss.importance import PRESETS
from consumer.loss.kl import aggregate, missing_kl
from consumer.training.trainer import SlipstreamTrainer
from consumer.training.trl_arguments import CHOICES
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import inputs_of_logprobs, loss_of_logprobs, slipstream_trainer

NAN = math.nan
BETA = 0.1
TOLERANCE = 1e-12  # numbers around 1, of a few dozen operations
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
CURRENT = torch.tensor([[-1.0, -0.5, -2.0], [-1.5, -0.7, -0.1]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.2, -0.4, -1.0], [-1.5, -1.7, -3.0]], dtype=torch.float64)
RATIO = torch.tensor([[1.0, 2.0, 9.0], [0.5, NAN, 7.0]], dtype=torch.float64)  # p / b

pytestmark = pytest.mark.usefixtures("float64")


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def shared(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SlipstreamTrainer:
    return slipstream_trainer(
        run_config(tmp_path_factory.mktemp("run"), one_layer_model, trainer={"beta": BETA}), one_layer_model
    )


@pytest.fixture
def trainer(shared: SlipstreamTrainer, monkeypatch: pytest.MonkeyPatch) -> SlipstreamTrainer:
    for name in (
        "loss_type",
        "importance_sampling_level",
        "beta",
        "vllm_importance_sampling_correction",
        "_correction",
    ):
        monkeypatch.setattr(shared, name, getattr(shared, name))  # the tests set them
    monkeypatch.setattr(shared.args, "use_bias_correction_kl", True)
    return shared


def inputs(ratio: torch.Tensor = RATIO, old: torch.Tensor = CURRENT, **more: Any) -> dict[str, torch.Tensor]:
    """Two completions without advantage: all of the loss is KL."""
    return inputs_of_logprobs(old - ratio.log(), torch.zeros(2), MASK, ref_per_token_logps=REFERENCE, **more)


def k3(current: torch.Tensor) -> torch.Tensor:
    return (REFERENCE - current).exp() - (REFERENCE - current) - 1


def test_the_missing_part_by_hand() -> None:
    current = torch.tensor([[-1.0, -1.0]])
    weights = missing_kl(
        current,
        current - math.log(3),  # π = 3 p
        current - math.log(2),  # π = 2 ref: k3 = 1/2 + log 2 - 1
        torch.tensor([[4.0, 1.0]]),
        torch.ones(1, 2),
        level="token",
    )
    assert_close(weights, torch.tensor([[(4 - 1) * 3 * (math.log(2) - 0.5), 0.0]]))


def test_with_the_sequence_level_it_is_the_geometric_mean_of_the_tokens_that_count() -> None:
    current, proximal = torch.zeros(1, 3), -torch.tensor([[4.0, 1.0, 99.0]]).log()
    weights = missing_kl(
        current, proximal, current - 1, torch.full((1, 3), 2.0), torch.tensor([[1, 1, 0]]), level="sequence"
    )
    assert_close(weights[0, :2], torch.full((2,), 2.0 * math.exp(-1)))


def test_with_the_missing_part_the_gradient_is_that_of_the_true_kl() -> None:
    """Summed over a vocabulary of four, each token as often as the sampler draws it. TRL's part alone is biased."""
    draw = torch.Generator().manual_seed(0)
    logits, behaviour, proximal, reference = torch.randn(4, 4, generator=draw).log_softmax(-1)
    logits = logits.clone().requires_grad_()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    policy = logits.log_softmax(-1)
    true = gradient((policy.exp() * (policy - reference)).sum())
    policy = logits.log_softmax(-1)
    trl = behaviour.exp() * (policy - proximal).exp() * ((reference - policy).exp() - (reference - policy) - 1)
    ratio = (proximal - behaviour).exp()
    missing = behaviour.exp() * missing_kl(policy, proximal, reference, ratio, torch.ones(4), level="token")
    assert_close(gradient((trl + missing).sum()), true)
    policy = logits.log_softmax(-1)
    trl = behaviour.exp() * (policy - proximal).exp() * ((reference - policy).exp() - (reference - policy) - 1)
    assert not torch.allclose(gradient(trl.sum()), true, rtol=0.1)


@pytest.mark.parametrize("loss_type", CHOICES["loss_type"])
def test_sums_are_normalized_as_trl_does(trainer: SlipstreamTrainer, loss_type: str) -> None:
    """TRL's loss of KL alone, against ours of the same tokens, in a micro-batch."""
    trainer.loss_type = loss_type
    batch = inputs(num_items_in_batch=torch.tensor(17), importance_sampling_ratio=torch.ones(2, 3))
    loss, _ = loss_of_logprobs(trainer, CURRENT, batch, trl=True)
    ours = aggregate(
        BETA * k3(CURRENT),
        MASK,
        loss_type,
        num_items=torch.tensor(17),
        max_completion_length=6,
    )
    assert loss > 1e-3
    assert ours.item() == pytest.approx(loss, rel=TOLERANCE)


def test_every_loss_type_has_a_sum() -> None:
    with pytest.raises(ValueError, match="no such loss type: ppo"):
        aggregate(CURRENT, MASK, "ppo", num_items=torch.tensor(1), max_completion_length=6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CHOICES["loss_type"])
def test_with_ratio_one_the_loss_is_trls(trainer: SlipstreamTrainer, loss_type: str, level: str) -> None:
    """With advantages, KL and a second update over the batch."""
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    old = CURRENT + 0.1 * REFERENCE
    batch = inputs(torch.ones(2, 3), old, old_per_token_logps=old) | {"advantages": torch.tensor([1.0, -0.5])}
    ours, our_gradient = loss_of_logprobs(trainer, CURRENT, dict(batch))
    theirs, their_gradient = loss_of_logprobs(
        trainer, CURRENT, batch | {"importance_sampling_ratio": torch.ones(2, 3)}, trl=True
    )
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert_close(our_gradient, their_gradient)


@pytest.mark.parametrize("loss_type", CHOICES["loss_type"])
def test_with_one_ratio_everywhere_the_kl_is_trls_times_that(trainer: SlipstreamTrainer, loss_type: str) -> None:
    trainer.loss_type = loss_type
    batch = inputs(torch.full((2, 3), 2.5))
    ours, our_gradient = loss_of_logprobs(trainer, CURRENT, dict(batch))
    trainer.beta = 2.5 * BETA
    theirs, their_gradient = loss_of_logprobs(
        trainer, CURRENT, batch | {"importance_sampling_ratio": torch.ones(2, 3)}, trl=True
    )
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert_close(our_gradient, their_gradient)


@pytest.mark.parametrize(
    ("preset", "changes", "weights"),
    [
        ("token_truncate", {}, [[1, 2, 3], [0.5, 1, 1]]),
        ("icepop", {"ratio_min": 0.6}, [[1, 2, 5], [0.6, 1, 1]]),  # masked for the policy, truncated for the KL
        ("token_truncate", {"token_veto": 0.6}, [[1, 2, 3], [0.5, 1, 1]]),
        ("sequence_truncate", {}, [[3, 3, 3], [0.5, 0.5, 1]]),
        ("geometric_mask", {}, [[1.1, 1.1, 1.1], [0.9, 0.9, 1]]),  # 2.6 and 0.5
        ("none", {}, [[1, 1, 1], [1, 1, 1]]),
        ("none", {"token_veto": 0.6}, [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_every_token_has_the_weight_of_its_preset(
    trainer: SlipstreamTrainer, preset: str, changes: dict[str, float], weights: list[list[float]]
) -> None:
    trainer.loss_type = "dapo"
    trainer._correction = dataclasses.replace(PRESETS[preset], **changes)
    trainer.vllm_importance_sampling_correction = trainer._correction.is_active
    loss, gradient = loss_of_logprobs(trainer, CURRENT, inputs())
    weighted = torch.tensor(weights) * k3(CURRENT) * MASK
    assert loss == pytest.approx(BETA * weighted.sum().item() / 5, rel=TOLERANCE)
    # d/dlog π of (π / p) k3 is (π / p) (k3 + 1 - ref / π), which is log π - log ref at π = p
    expected = BETA * torch.tensor(weights) * (CURRENT - REFERENCE) * MASK / 5
    assert_close(gradient, expected)


def test_without_bias_correction_the_term_is_trls(trainer: SlipstreamTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)
    ours = loss_of_logprobs(trainer, CURRENT, inputs())
    theirs = loss_of_logprobs(trainer, CURRENT, inputs(importance_sampling_ratio=torch.ones(2, 3)), trl=True)
    assert ours[0] == theirs[0]
    assert torch.equal(ours[1], theirs[1])


def test_trls_metric_stays_and_one_micro_batch_does_not_leak_into_the_next(trainer: SlipstreamTrainer) -> None:
    trainer._metrics["train"].clear()
    first, _ = loss_of_logprobs(trainer, CURRENT, inputs())
    assert trainer._metrics["train"]["kl"] == [pytest.approx((k3(CURRENT) * MASK).sum().item() / 5, rel=TOLERANCE)]
    trainer.beta = 0.0
    assert loss_of_logprobs(trainer, CURRENT, inputs() | {"advantages": torch.ones(2)})[0] < 0
    trainer.beta = BETA
    assert loss_of_logprobs(trainer, CURRENT, inputs())[0] == first
