"""Log-probs of training are those of inference, whatever a model's configuration has for its own training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from consumer.learn.inference import compute_as_in_inference
from consumer.learn.model import load_model, save_weights
from tests.integration.models import build_model, char_tokenizer
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import slipstream_trainer

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])
FEW = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
USUAL = FEW | {"intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, dict[str, Any]] = {
    "llama": USUAL | {"attention_dropout": 0.5},
    "granite": USUAL | {"attention_dropout": 0.5},
    "phi": USUAL | {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.5, "embd_pdrop": 0.5},
    "gpt_neox": FEW | {"intermediate_size": 48, "attention_dropout": 0.5, "hidden_dropout": 0.5},
    "falcon": FEW | {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.5},
    "opt": {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 4, "ffn_dim": 48,
            "num_attention_heads": 4, "dropout": 0.5, "layerdrop": 0.5},
    "mixtral": EXPERTS | {"router_jitter_noise": 0.9},
    "phimoe": EXPERTS | {"router_jitter_noise": 0.01, "input_jitter_noise": 0.5, "attention_dropout": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_what_a_pass_computes_in_training(family: str) -> None:
    torch.manual_seed(0)
    values = MODELS[family] | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**values)).float()

    def logits(*, trains: bool) -> torch.Tensor:
        return model.train(trains)(input_ids=IDS, use_cache=False).logits.detach()

    expected = logits(trains=False)
    assert (logits(trains=True) - expected).abs().max() > 1e-3, "the model has no such term"
    compute_as_in_inference(model)
    torch.testing.assert_close(logits(trains=True), expected, atol=1e-5, rtol=0)
    assert model.training, "layers are recomputed in training alone"


def with_values(model: Path, folder: Path, **values: Any) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def test_dropout_of_the_model_is_off_and_that_of_an_adapter_stays(tmp_path: Path, one_layer_model: Path) -> None:
    model = with_values(one_layer_model, tmp_path / "model", attention_dropout=0.5)
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.25, "target_modules": ["q_proj"]}
    trainer = slipstream_trainer(run_config(tmp_path, model, lora=lora), model)
    drops = [module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert drops
    assert set(drops) == {0.25}
    assert trainer.base.model.layers[0].self_attn.attention_dropout == 0.0


def test_weights_are_saved_with_the_dropout_that_they_came_with(tmp_path: Path, one_layer_model: Path) -> None:
    model = with_values(one_layer_model, tmp_path / "model", attention_dropout=0.5)
    loaded = load_model(model)
    compute_as_in_inference(loaded)
    save_weights(loaded, char_tokenizer(), str(tmp_path / "saved"))
    assert AutoConfig.from_pretrained(tmp_path / "saved").attention_dropout == 0.5


@pytest.mark.long
def test_experts_have_no_balancing_loss_unless_it_is_set(tmp_path: Path) -> None:
    made = build_model("qwen3_moe", tmp_path / "experts")
    model = with_values(made, tmp_path / "model", router_aux_loss_coef=0.9, output_router_logits=True)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    trainer = slipstream_trainer(run_config(tmp_path / "run", model, lora=lora), model)
    assert trainer.recipe.tree, "a balancing loss takes padded rows"
    [batch] = trainer._prepare_inputs(
        trainer.recipe.tensors([rollout_group([[3], [4], [5], [6]], rewards=[1, 2, 3, 4])])
    )
    assert trainer.forward_pass(batch).aux_loss is None
