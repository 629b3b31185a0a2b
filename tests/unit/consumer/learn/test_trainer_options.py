"""Options of TRL and transformers that act around the loss do here what they do there: two steps are trained with each.

Those of the loss itself are compared with TRL's own trainer in test_loss_parity.py and its neighbours.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.learn.options import build_arguments, build_lora
from consumer.learn.trainer import SlipstreamTrainer
from replay.batch_selection import TrainingBatch
from tests.integration.models import build_model
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.learn.test_batches_trained import some_groups
from tests.unit.consumer.trl_reference import lora_parameters, set_weights

pytestmark = pytest.mark.long

MOVES = [
    {"learning_rate": 1e-2},
    {"lr_scheduler_type": "constant"},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}},
    {"warmup_steps": 1},
    {"weight_decay": 0.5},
    {"max_grad_norm": 1e-6},
    {"optim": "sgd"},
    {"optim": "adafactor"},
    {"adam_beta1": 0.1},
    {"adam_beta2": 0.1},
    {"adam_epsilon": 1.0},
    {"disable_dropout": True},
]
KEEPS = [
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    {"torch_empty_cache_steps": 1},
    {"debug": "underflow_overflow"},
    {"skip_memory_metrics": False},
    {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True},
    {"logging_strategy": "no"},
    {"logging_strategy": "steps", "logging_steps": 2, "logging_first_step": True, "logging_nan_inf_filter": False},
    {"log_level": "error", "run_name": "one", "project": "two"},
]


def trained(folder: Path, model: Path, *, dropout: float = 0.0, **options: Any) -> tuple[torch.Tensor, list[dict]]:
    """The adapter after two steps, as one vector, and what was logged."""
    trainer_section = {"max_steps": 2, "save_strategy": "no", "optim": "adamw_torch", **options}
    config = run_config(folder, model, lora={"lora_dropout": dropout}, trainer=trainer_section)
    batches = [TrainingBatch(step + 1, 1, step + 1, some_groups(2, seed=step), 2) for step in range(2)]
    arguments = build_arguments(config, on_gpu=False, num_prompts=8)
    trainer = SlipstreamTrainer(
        config, arguments, build_lora(config), model, batches, lambda step, staged, write: write()
    )
    set_weights(trainer)
    trainer.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in lora_parameters(trainer)])
    assert trainer.state.global_step == 2
    assert weights.isfinite().all()
    return weights, trainer.state.log_history


def named(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, one_layer_model: Path) -> torch.Tensor:
    return trained(tmp_path_factory.mktemp("plain"), one_layer_model)[0]


@pytest.mark.parametrize("options", MOVES, ids=named)
def test_what_changes_the_steps(
    tmp_path: Path, one_layer_model: Path, plain: torch.Tensor, options: dict[str, Any]
) -> None:
    dropout = 0.5 if "disable_dropout" in options else 0.0
    without = trained(tmp_path, one_layer_model, dropout=dropout)[0] if dropout else plain
    assert (trained(tmp_path, one_layer_model, dropout=dropout, **options)[0] - without).abs().max() > 1e-5


@pytest.mark.parametrize("options", KEEPS, ids=named)
def test_what_does_not(tmp_path: Path, one_layer_model: Path, plain: torch.Tensor, options: dict[str, Any]) -> None:
    torch.testing.assert_close(trained(tmp_path, one_layer_model, **options)[0], plain, atol=1e-4, rtol=0)


def test_a_head_in_float32(tmp_path: Path) -> None:
    """Where it shares no weights with the embeddings; elsewhere TRL cannot (`consumer.learn.options.check_model`)."""
    untied = build_model("llama", tmp_path / "llama", num_layers=1)
    plain, _ = trained(tmp_path, untied)
    cast, _ = trained(tmp_path, untied, cast_lm_head_to_fp32=True)
    torch.testing.assert_close(cast, plain, atol=1e-4, rtol=0)


def test_what_is_logged_and_when(tmp_path: Path, one_layer_model: Path) -> None:
    _, logged = trained(tmp_path, one_layer_model, logging_steps=2)
    assert [entry["step"] for entry in logged if "loss" in entry] == [2]
    _, logged = trained(tmp_path, one_layer_model, logging_steps=2, logging_first_step=True, skip_memory_metrics=False)
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2]
    assert any("train_mem_cpu_alloc_delta" in entry for entry in logged)
    trained(tmp_path, one_layer_model, log_completions=True)
    assert len(list((tmp_path / "checkpoints" / "completions").glob("*.parquet"))) == 2


def test_trackers_get_the_name_of_the_run_and_what_its_file_says_beside_the_options_of_trl(tmp_path: Path) -> None:
    """transformers sends them `to_dict()`. Sections that may hold secrets are not in it."""
    sections = {"pipeline": {"max_staleness": 3}, "engine": {"max_model_len": 64}}
    arguments = build_arguments(run_config(tmp_path / "sums", **sections), on_gpu=False, num_prompts=10)
    assert arguments.run_name == "sums"
    told = arguments.to_dict()
    assert told["pipeline.max_staleness"] == 3
    assert told["learning_rate"] == 1e-3
    assert not [key for key in told if key.startswith(("engine", "serve", "environment", "transport"))]
    named = run_config(tmp_path / "sums", trainer={"run_name": "third try"})
    assert build_arguments(named, on_gpu=False, num_prompts=10).run_name == "third try"
