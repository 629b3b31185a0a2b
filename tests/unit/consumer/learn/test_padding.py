"""Nothing that a model computes for padding reaches loss or gradient, also where TRL makes the pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.integration.models import build_model
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import loss_and_gradients, slipstream_trainer

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def nothing_to_attend_to(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """As transformers 5.23 does it for Gemma 2: a softmax over nothing is NaN."""
    found, weights = sdpa_attention_forward(module, query, key, value, mask, **options)
    if mask is not None:
        found = found.masked_fill(~mask.any(-1)[:, 0, :, None, None], torch.nan)
    return found, weights


@pytest.mark.long
@pytest.mark.parametrize(("family", "trainer"), [("llama", {}), ("mixtral", {"router_aux_loss_coef": 0.5})])
def test_queries_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, trainer: dict[str, Any]
) -> None:
    model = build_model(family, tmp_path / "model")
    ours = slipstream_trainer(run_config(tmp_path, model, trainer=trainer, lora=LORA), model)
    assert (ours.row_passes.logits is None) == (family == "mixtral")
    groups = [rollout_group([[3, 4], [5], [6, 7], [8]], prompt=prompt) for prompt in ([3], [4, 5, 6])]
    loss, gradient = loss_and_gradients(ours, ours._prepare_inputs(ours.recipe.tensors(groups)))
    assert gradient.abs().max() > 0
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", nothing_to_attend_to)
    again, gradient_again = loss_and_gradients(ours, ours._prepare_inputs(ours.recipe.tensors(groups)))
    assert again == loss
    assert torch.equal(gradient_again, gradient)
