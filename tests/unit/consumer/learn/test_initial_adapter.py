"""An adapter to start from is loaded tensor for tensor, or refused with what does not agree."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from consumer.learn.adapters import initial_adapter
from consumer.learn.loss import ReferencePolicy
from protocol.errors import ConfigError
from tests.integration.models import random_adapter

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "made"
    random_adapter(tiny_model, folder, rank=4)
    return folder


@pytest.fixture
def copy(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "copy"))


def fresh(model: Path, **options: Any) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    return get_peft_model(base, LoraConfig(**settings))


def change(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def refused(folder: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        initial_adapter(str(folder), LORA)
    return str(caught.value)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.long
def test_it_becomes_the_policy_and_what_the_policy_is_measured_from(tiny_model: Path, adapter: Path) -> None:
    initial = initial_adapter(str(adapter), LORA)
    model = fresh(tiny_model)
    before = logits(model)
    initial.load_into(model)
    loaded = logits(model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.testing.assert_close(loaded, logits(PeftModel.from_pretrained(base, adapter)))
    assert (loaded - before).abs().max() > 0.1

    with ReferencePolicy(model):
        torch.testing.assert_close(logits(model), before)
    reference = ReferencePolicy(model, initial.tensors)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)
    trained = logits(model)
    for _ in range(2):
        with reference:
            torch.testing.assert_close(logits(model), loaded)
        torch.testing.assert_close(logits(model), trained)
    assert [p for p in model.parameters() if p.requires_grad] == parameters


@pytest.mark.parametrize(
    ("key", "value"),
    [("r", 8), ("lora_alpha", 16), ("use_rslora", True), ("use_dora", True), ("rank_pattern", {"q": 2})],
)
def test_settings_that_do_not_agree(copy: Path, key: str, value: Any) -> None:
    change(copy, **{key: value})
    ours = getattr(LORA, key)
    assert refused(copy) == (
        f"lora.init_from: {copy} has {key}={value}, the lora section {key}={ours}; set lora.{key}={value}"
    )


def test_what_vllm_cannot_serve(copy: Path) -> None:
    change(copy, lora_bias=True)
    assert refused(copy).endswith("has lora_bias=True, which vLLM cannot serve")


def test_an_adapter_of_a_base_that_has_lost_a_part(copy: Path) -> None:
    change(copy, init_lora_weights="gaussian", rank_pattern=None)
    initial_adapter(str(copy), LORA)
    change(copy, init_lora_weights="pissa_niter_4")
    assert "init_lora_weights=pissa_niter_4" in refused(copy)


def test_another_kind_of_adapter(copy: Path) -> None:
    change(copy, peft_type="IA3")
    assert "is of an adapter of type IA3, expected LORA" in refused(copy)


def test_no_adapter_at_all(copy: Path, tmp_path: Path) -> None:
    (copy / "adapter_model.safetensors").rename(copy / "adapter_model.bin")
    assert "adapter_model.bin is not read" in refused(copy)
    for place in ("./absent", "absent"):
        assert f"lora.init_from: there is no folder {place} (searched from" in refused(place)


def test_a_broken_file(copy: Path) -> None:
    (copy / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    assert (
        refused(copy)
        == f"lora.init_from: {copy}/adapter_model.safetensors is no file of safetensors; download it again"
    )


def test_an_adapter_that_changes_nothing_or_is_not_finite(copy: Path) -> None:
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: t.zero_() if "lora_B" in name else t for name, t in load_file(file).items()}, file)
    assert "it changes nothing" in refused(copy)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] / 0}, file)
    assert f"{name} has values that are not finite" in refused(copy)


def test_other_modules(tiny_model: Path, adapter: Path) -> None:
    model = fresh(tiny_model, target_modules=["q_proj"])
    with pytest.raises(ConfigError) as caught:
        initial_adapter(str(adapter), LORA).load_into(model)
    message = str(caught.value)
    assert (
        "24 tensors are left over, such as base_model.model.model.layers.0.mlp.down_proj.lora_A.weight. Its" in message
    )
    assert "Its target_modules are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in message


def test_another_shape(tiny_model: Path, copy: Path) -> None:
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file(tensors | {name: torch.ones(4, 7)}, file)
    with pytest.raises(ConfigError, match=r"has shape \[4, 7\], expected .* It is of another model"):
        initial_adapter(str(copy), LORA).load_into(fresh(tiny_model))
