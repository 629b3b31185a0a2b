"""Every loss, type of number, layout and optimizer that a GPU takes another way: two steps of each."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Model
from tests.gpu.trainers import trainer
from tests.unit.consumer.learn.test_distillation_steps import TEACHERS

pytestmark = pytest.mark.stand_in

LLAMA = {"family": "llama"}
MOE = {"family": "qwen3_moe", "lora": {"target_modules": ["q_proj", "v_proj"]}}
WIDE = {"ratio_min": 1e-9, "ratio_max": 1e9}
"""The log-probs that came with the made-up completions are not those of any policy."""
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "fp16 with a scaler": {"dtype": "float32", "trainer": {"fp16": True}},
    "tf32": {"dtype": "float32", "trainer": {"tf32": True}},
    "a reference policy": {"trainer": {"beta": 0.1}},
    "two updates per batch": {"trainer": {"num_iterations": 2}},
    "checkpointing": {"trainer": {"gradient_checkpointing": True}},
    "checkpointing with offload": {
        "trainer": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    },
    "the tokens of most entropy": {"trainer": {"top_entropy_quantile": 0.5}},
    "an entropy bonus": {"trainer": {"entropy_coef": 0.01}},
    "an adaptive entropy bonus": {"trainer": {"use_adaptive_entropy": True}},
    "several passes": {"pipeline": {"trainer_tokens_per_micro_batch": 8}},
    "several passes, the tokens of most entropy": {
        "pipeline": {"trainer_tokens_per_micro_batch": 8},
        "trainer": {"top_entropy_quantile": 0.5},
    },
    "ratios of completions": {"trainer": {"importance_sampling_level": "sequence"}},
    **{
        name: {"trainer": {"loss_type": name}} for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo")
    },
    "luspo": {"trainer": {"loss_type": "luspo", "importance_sampling_level": "sequence"}},
    "llama": LLAMA,
    "gemma3": {"family": "gemma3"},
    "experts": MOE,
    "experts with a balancing loss": MOE | {"trainer": {"router_aux_loss_coef": 0.01}},
    "a head in float32": LLAMA | {"trainer": {"cast_lm_head_to_fp32": True}},
    "dropout": {"lora": {"lora_dropout": 0.5}},
    "a mask by geometric means": {"correction": WIDE | {"preset": "geometric_mask"}},
    "a veto": {
        "correction": WIDE | {"preset": "token_truncate", "token_veto": 1e-9, "probability_difference_max": 0.999}
    },
    "an off-policy mask": {"trainer": {"off_policy_mask_threshold": 0.5}},
    "a teacher's divergence": {"teachers": TEACHERS, "distillation": {"mode": "divergence"}},
    "logged completions": {"trainer": {"log_completions": True}},
    **{name: {"trainer": {"optim": name}} for name in ("adamw_torch", "adamw_torch_fused", "adafactor", "adamw_8bit")},
    "NF4 with checkpointing": LLAMA
    | {"model_options": {"quantization": "nf4"}, "trainer": {"gradient_checkpointing": True}},
    "int8": LLAMA | {"model_options": {"quantization": "int8"}},
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_on_the_gpu(name: str, tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    options = dict(CASES[name])
    trained = trainer(tmp_path, model(options.pop("family", "qwen2")), steps=2, **options)
    before = weights(trained)
    trained.train()
    assert trained.state.global_step == trained.args.max_steps
    assert trained.last is not None
    assert math.isfinite(trained.last.loss)
    assert math.isfinite(trained.last.grad_norm)
    assert {str(each.device) for each in trained.model.parameters()} == {"cuda:0"}
    of_optimizer = {str(each.device) for each in trained.kept_tensors()}
    assert of_optimizer <= {"cuda:0", "cpu"}
    has_scaler = trained.accelerator.scaler is not None
    assert has_scaler == bool(trained.args.fp16)
    if not has_scaler:  # which may skip the first steps
        assert not torch.equal(before, weights(trained))


def weights(trained: Any) -> torch.Tensor:
    return torch.cat(
        [each.detach().float().cpu().flatten() for each in trained.model.parameters() if each.requires_grad]
    )
