"""The KL term: as TRL's without the ratio of the sampler, and with it against the true gradient and by hand, in float64."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.learn.importance import PRESETS, Correction
from consumer.learn.loss import reference_kl
from protocol.config.trainer_keys import CHOICES
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import (
    GRPOTrainer,
    inputs_of_logprobs,
    loss_of_logprobs,
    loss_options,
    trl_loss_of_logprobs,
    trl_trainer,
)

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


def inputs(ratio: torch.Tensor = RATIO, old: torch.Tensor = CURRENT, **more: Any) -> dict[str, torch.Tensor]:
    """Two completions without advantage: all of the loss is KL."""
    return inputs_of_logprobs(old - ratio.log(), torch.zeros(2), MASK, ref_per_token_logps=REFERENCE, **more)


def k3(current: torch.Tensor) -> torch.Tensor:
    return (REFERENCE - current).exp() - (REFERENCE - current) - 1


@pytest.fixture(scope="module")
def theirs(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    trainer = trl_trainer(run_config(tmp_path_factory.mktemp("run"), one_layer_model), one_layer_model)
    trainer.args.use_bias_correction_kl = True
    return trainer


@pytest.mark.parametrize("ratio", [1.0, 2.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CHOICES["loss_type"])
def test_with_one_ratio_everywhere_the_kl_is_trls_times_that(
    theirs: GRPOTrainer, monkeypatch: pytest.MonkeyPatch, loss_type: str, level: str, ratio: float
) -> None:
    """In a second update over the batch; where the ratio is 1, with advantages."""
    old = CURRENT + 0.1 * REFERENCE
    batch = inputs(torch.full((2, 3), ratio), old, old_per_token_logps=old)
    if ratio == 1.0:
        batch["advantages"] = torch.tensor([1.0, -0.5])
    changes = {"loss_type": loss_type, "importance_sampling_level": level}
    options = loss_options(beta=BETA, use_bias_correction_kl=True, **changes)
    for name, value in (changes | {"beta": ratio * BETA}).items():
        monkeypatch.setattr(theirs, name, value)
    expected = trl_loss_of_logprobs(theirs, CURRENT, batch | {"importance_sampling_ratio": torch.ones(2, 3)})
    loss, gradient = loss_of_logprobs(options, PRESETS["token_truncate"], CURRENT, batch)
    assert loss == pytest.approx(expected[0], rel=TOLERANCE)
    assert_close(gradient, expected[1])


def test_the_gradient_is_that_of_the_true_kl() -> None:
    """Summed over a vocabulary of four, each token as often as the sampler draws it. Without p / b it is biased."""
    draw = torch.Generator().manual_seed(0)
    logits, behaviour, proximal, reference = torch.randn(4, 4, generator=draw).log_softmax(-1)
    logits = logits.clone().requires_grad_()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    def estimate() -> torch.Tensor:
        batch = {"completion_mask": torch.ones(1, 4), "ref_per_token_logps": reference[None]}
        batch["old_per_token_logps"] = proximal[None]
        return behaviour.exp() * reference_kl(
            loss_options(use_bias_correction_kl=True), batch, logits.log_softmax(-1)[None]
        )

    policy = logits.log_softmax(-1)
    true = gradient((policy.exp() * (policy - reference)).sum())
    assert_close(gradient((estimate() * (proximal - behaviour).exp()).sum()), true)
    assert not torch.allclose(gradient(estimate().sum()), true, rtol=0.1)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (PRESETS["token_truncate"], [[1, 2, 3], [0.5, 1, 1]]),
        (
            dataclasses.replace(PRESETS["icepop"], ratio_min=0.6),
            [[1, 2, 5], [0.6, 1, 1]],
        ),  # masked for the policy alone
        (dataclasses.replace(PRESETS["token_truncate"], token_veto=0.6), [[1, 2, 3], [0.5, 1, 1]]),
        (PRESETS["sequence_truncate"], [[3, 3, 3], [0.5, 0.5, 1]]),
        (PRESETS["geometric_mask"], [[1.1, 1.1, 1.1], [0.9, 0.9, 1]]),  # 2.6 and 0.5
        (PRESETS["none"], [[1, 1, 1], [1, 1, 1]]),
        (dataclasses.replace(PRESETS["none"], token_veto=0.6), [[1, 1, 1], [1, 1, 1]]),
    ],
)
@pytest.mark.parametrize("corrected", [True, False])
def test_every_token_has_the_weight_of_its_preset(
    correction: Correction, weights: list[list[float]], corrected: bool
) -> None:
    """Without bias correction it is 1, and the gradient is that of k3 alone."""
    options = loss_options(loss_type="dapo", beta=BETA, use_bias_correction_kl=corrected)
    loss, gradient = loss_of_logprobs(options, correction, CURRENT, inputs())
    weight = torch.tensor(weights) if corrected else torch.ones(2, 3)
    assert loss == pytest.approx(BETA * (weight * k3(CURRENT) * MASK).sum().item() / 5, rel=TOLERANCE)
    # d/dlog π of (π / p) k3 is (π / p) (k3 + 1 - ref / π), which is log π - log ref at π = p
    slope = CURRENT - REFERENCE if corrected else 1 - (REFERENCE - CURRENT).exp()
    assert_close(gradient, BETA * weight * slope * MASK / 5)
