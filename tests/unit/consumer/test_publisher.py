"""The blob is the adapter: PEFT loads it and gets the trainer's weights and outputs."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from consumer.publisher import adapter_blob
from protocol.adapter_blob import pack, unpack

from .builders import run_config
from .trl_reference import lora_parameters, perturb, slipstream_trainer


def test_peft_loads_the_blob_and_computes_the_same(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    data, digest = pack(adapter_blob(trainer.model))
    unpack(data, digest, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    expected = {name: value for name, value in trainer.model.state_dict().items() if "lora_" in name}
    actual = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert len(expected) == len(actual) == 2 * 2 * 7  # A and B, two layers, all linear modules
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=0, rtol=0)
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        ours = trainer.model.eval()(input_ids=tokens, fused_lm_head=False).logits
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, ours)


def test_the_blob_is_a_copy_and_equal_weights_give_equal_bytes(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    first = pack(adapter_blob(trainer.model))
    assert pack(adapter_blob(trainer.model)) == first
    blob = adapter_blob(trainer.model)
    perturb(trainer, seed=1)
    assert pack(blob) == first, "training went on, the blob did not"
    assert pack(adapter_blob(trainer.model))[1] != first[1]
    assert all(parameter.requires_grad for parameter in lora_parameters(trainer))


def test_the_configuration_is_plain_json_for_inference(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    settings = json.loads(adapter_blob(trainer.model).config_json)
    assert settings["peft_type"] == "LORA"
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["inference_mode"] is True
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert len(settings["target_modules"]) == 2 * 7
