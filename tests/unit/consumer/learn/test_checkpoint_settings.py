"""Settings by which a checkpoint no longer fits are refused by name; all others have their effect from then on."""

from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import get_scheduler

from consumer.learn.checkpoint_settings import (
    OF_ADAPTER,
    OF_OPTIMIZER,
    Settings,
    check_settings,
    present_settings,
    settings_of,
)
from consumer.learn.checkpoints import Checkpoint
from consumer.learn.loss import EntropyBonus
from consumer.learn.options import build_arguments, build_lora
from protocol.config.trainer_keys import WORKS
from protocol.errors import ConfigError
from tests.unit.consumer.builders import run_config

# Keys of `trainer` that a run may go on with in another value.
FREE = """
num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm
adam_beta1 adam_beta2 adam_epsilon loss_type beta epsilon epsilon_high delta num_iterations importance_sampling_level
scale_rewards multi_objective_aggregation mask_truncated_completions off_policy_mask_threshold use_bias_correction_kl
top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg router_aux_loss_coef
model_init_kwargs disable_dropout cast_lm_head_to_fp32 bf16 tf32 gradient_checkpointing gradient_checkpointing_kwargs
torch_empty_cache_steps full_determinism logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_level
report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id log_completions
num_completions_to_print log_unique_prompts debug skip_memory_metrics save_strategy save_steps save_total_limit
"""

# Fields of a LoraConfig that decide what an adapter is.
COMPARED = """
r target_modules exclude_modules lora_alpha fan_in_fan_out bias use_rslora modules_to_save init_lora_weights
layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config megatron_core trainable_token_indices
loftq_config eva_config corda_config lora_ga_config use_dora velora_config alora_invocation_tokens use_qalora
qalora_group_size monteclora_config layer_replication lora_bias target_parameters use_bdlora arrow_config kasa_config
"""


PATCHED: dict[str, Any] = {
    "swap": {"in_flight": "continue"},
    "dtype": "bfloat16",
}  # what policies that travel as patches need


def settings(tmp_path: Path, **sections: Any) -> Settings:
    config = run_config(tmp_path, **sections)
    return settings_of(config, build_arguments(config, on_gpu=False, num_prompts=8), build_lora(config))


def refusal(before: Settings, now: Settings) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(Checkpoint(Path("run/checkpoints/checkpoint-60"), {"settings": before}), now)
    return str(caught.value)


def test_every_key_of_the_trainer_is_compared_or_holds_from_the_start_on() -> None:
    assert set(FREE.split()) | set(OF_OPTIMIZER) == set(chain.from_iterable(WORKS.values()))
    assert not set(FREE.split()) & set(OF_OPTIMIZER)


def test_every_field_of_an_adapter_is_compared_or_known_to_change_none_of_its_tensors() -> None:
    """Fields that this release of PEFT does not have are of other releases in the range."""
    assert set(COMPARED.split()) >= OF_ADAPTER
    assert {"r", "lora_alpha", "target_modules"} <= {field.name for field in fields(LoraConfig)} & OF_ADAPTER


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"lora": {"r": 16}}, {"lora": {"r": 8}}, "lora.r is 8 now and was 16"),
        ({"lora": {"lora_alpha": 16}}, {"lora": {}}, "lora.lora_alpha is 8 now and was 16"),
        (
            {"lora": {"target_modules": ["q_proj"]}},
            {"lora": {"target_modules": ["v_proj", "q_proj"]}},
            "lora.target_modules is [q_proj, v_proj] now and was [q_proj]",
        ),
        (PATCHED, PATCHED | {"lora": {"use_dora": True}}, "lora.use_dora is true now and was false"),
        (PATCHED, PATCHED | {"lora": {"modules_to_save": ["norm"]}}, "lora.modules_to_save is [norm] now and was null"),
        (PATCHED, PATCHED | {"lora": {"rank_pattern": {"q": 2}}}, "lora.rank_pattern is {q: 2} now and was {}"),
        ({"trainer": {}}, {"trainer": {"optim": "sgd"}}, "trainer.optim is sgd now and was adamw_torch"),
        ({"trainer": {}}, {"trainer": {"optim_args": "a=1"}}, "trainer.optim_args is a=1 now and was null"),
        ({"seed": 1}, {"seed": 2}, "seed is 2 now and was 1"),
        ({}, {"pipeline": {"sync_interval": 2}}, "pipeline.sync_interval is 2 now and was 1"),
    ],
)
def test_what_differs_is_named_with_both_values(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    found = refusal(settings(tmp_path, **before), settings(tmp_path, **now))
    assert f"{said} when checkpoint-60 was written" in found


def test_all_that_differs_is_said_and_an_adapter_is_no_model(tmp_path: Path) -> None:
    before, now = settings(tmp_path), settings(tmp_path, seed=1, lora={"r": 8})
    found = refusal(before, now)
    assert "lora.r is 8 now and was 4" in found
    assert "seed is 1 now and was 42" in found
    assert "lora is null now and was an adapter" in refusal(before, settings(tmp_path, lora=None, **PATCHED))


def test_what_means_the_same_is_the_same(tmp_path: Path) -> None:
    before = settings(tmp_path, lora={"target_modules": ["q_proj", "v_proj"]}, trainer={"optim": "adamw_torch"})
    now = settings(
        tmp_path,
        lora={"target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.1},
        trainer={"optim": "adamw_torch_fused", "learning_rate": 1e-5, "max_steps": 9, "lr_scheduler_type": "cosine"},
    )
    check_settings(Checkpoint(Path("checkpoint-60"), {"settings": before}), now)


def optimizer_and_scheduler(kind: str, rate: float, steps: int = 10, **options: Any) -> tuple[Any, Any]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter], lr=rate, **options)
    return optimizer, get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=steps)


def take_step(optimizer: Any, scheduler: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()


def test_rate_schedule_and_hyperparameters_are_those_of_the_configuration_and_moments_those_of_the_checkpoint() -> None:
    old, old_schedule = optimizer_and_scheduler("constant", 0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for _ in range(2):
        take_step(old, old_schedule)
    new, schedule = optimizer_and_scheduler("linear", 0.01, betas=(0.8, 0.95), weight_decay=0.0)
    with present_settings(new, schedule):
        new.load_state_dict(old.state_dict())
        schedule.load_state_dict(old_schedule.state_dict())
    [group] = new.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.0)
    assert group["lr"] == pytest.approx(0.008)  # after 2 of 10 steps
    assert schedule.get_last_lr() == [pytest.approx(0.008)]
    [state] = new.state.values()
    assert state["exp_avg"].item() == pytest.approx(0.1 + 0.9 * 0.1)
    take_step(new, schedule)
    assert group["lr"] == pytest.approx(0.007)
    assert state["step"] == 3


def test_an_adaptive_weight_of_the_entropy_goes_on_unless_it_is_given_anew(tmp_path: Path) -> None:
    def bonus(coef: float) -> EntropyBonus:
        trainer = {
            "use_adaptive_entropy": True,
            "entropy_coef": coef,
            "entropy_target": 0.5,
            "entropy_coef_delta": 0.125,
        }
        return EntropyBonus(build_arguments(run_config(tmp_path, trainer=trainer), on_gpu=False, num_prompts=8))

    before = bonus(0.25)
    before.adapt(0.1)
    before.save(tmp_path)
    for coef, expected in ((0.25, 0.375), (0.5, 0.5)):
        now = bonus(coef)
        now.load(tmp_path)
        assert now.coef == expected
