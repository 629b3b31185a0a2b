"""The load-balancing loss of experts is the one of TRL: of every row, whatever its advantage, and however the step is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.learn.trainer import SlipstreamTrainer
from replay.groups import RolloutGroup
from tests.integration.models import build_model
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import (
    loss_and_gradients,
    metrics_of,
    slipstream_trainer,
    trl_inputs,
    trl_trainer,
)

COEFFICIENT = 0.5
EOS = 1


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(request.param, tmp_path_factory.mktemp(request.param) / "model")


def groups(*, flat: bool = False) -> list[RolloutGroup]:
    """One of the completions, and one of the groups, has no advantage; one completion was cut."""
    first = rollout_group(
        [[11, 12, EOS], [14, EOS], [16, 17, 18, 19, 20], [EOS]],
        prompt=[3, 4, 5, 6],
        rewards=[1.0] * 4 if flat else [0.0, 1.0, 2.0, 1.0],
        truncated=[False, False, True, False],
    )
    second = rollout_group([[22, EOS], [EOS], [25, 26, EOS], [28, 29, 30, EOS]], prompt=[7, 8], rewards=[1.0] * 4)
    return [first, second]


def config_of(folder: Path, model: Path, *, max_tokens: int = 1000, **options: Any) -> Any:
    return run_config(
        folder,
        model,
        pipeline={"trainer_tokens_per_micro_batch": max_tokens},
        correction={"preset": "none"},
        lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        trainer={"router_aux_loss_coef": COEFFICIENT, **options},
    )


@pytest.mark.long
@pytest.mark.parametrize("options", [{"loss_type": "dapo"}, {"loss_type": "grpo", "mask_truncated_completions": True}])
def test_rows_without_advantage_count_as_in_trl(tmp_path: Path, experts: Path, options: dict[str, Any]) -> None:
    config = config_of(tmp_path, experts, **options)
    theirs = trl_trainer(config, experts, correction=False)
    ours = slipstream_trainer(config, experts)
    expected, expected_gradient = loss_and_gradients(theirs, trl_inputs(theirs, groups()))
    loss, gradient = loss_and_gradients(ours, ours._prepare_inputs(ours.recipe.tensors(groups())))
    assert theirs._metrics["train"]["aux_loss"][-1] > 0.5
    assert loss == pytest.approx(expected, rel=1e-4)
    scale = float(expected_gradient.abs().max())
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, atol=1e-4, rtol=0)


@pytest.mark.long
def test_it_is_the_mean_over_the_tokens_of_the_step(tmp_path: Path, experts: Path) -> None:
    """Nothing here has an advantage, so nothing else is in the loss."""
    trainer: SlipstreamTrainer = slipstream_trainer(config_of(tmp_path, experts, max_tokens=12), experts)
    batches = trainer.recipe.tensors(groups(flat=True))
    assert len(batches) > 2
    loss, gradient = loss_and_gradients(trainer, trainer._prepare_inputs(batches))
    balance = metrics_of(trainer)["aux_loss"]
    assert balance > 0.5
    assert loss == pytest.approx(COEFFICIENT * balance, rel=1e-4)
    assert gradient.abs().max() > 0


@pytest.mark.long
def test_without_it_rows_without_advantage_are_left_out(tmp_path: Path, experts: Path) -> None:
    trainer = slipstream_trainer(config_of(tmp_path, experts, router_aux_loss_coef=0.0), experts)
    [batch] = trainer.recipe.tensors(groups())
    assert len(batch["advantages"]) == 2
