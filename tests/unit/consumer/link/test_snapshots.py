"""A snapshot is the adapter: PEFT loads it and gets the trainer's weights and outputs, whatever is trained afterwards."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from consumer.link import snapshots as snapshots_module
from consumer.link.snapshots import AdapterSnapshots
from protocol.wire.adapter_blob import parse, unpack
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import lora_parameters, perturb, slipstream_trainer


@pytest.mark.long
def test_peft_loads_a_snapshot_and_computes_the_same(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    snapshots = AdapterSnapshots(trainer.model)
    perturb(trainer, seed=1)
    snapshot = snapshots.take()
    unpack(bytes(snapshot.data), snapshot.published(0).digest, tmp_path / "adapter")
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


@pytest.mark.long
def test_a_snapshot_is_of_its_moment_and_equal_weights_give_equal_bytes(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    snapshots = AdapterSnapshots(trainer.model)
    first, same = snapshots.take(), snapshots.take()
    before = bytes(first.data)
    assert bytes(same.data) == before
    assert first.published(0).digest == same.published(0).digest == hashlib.sha256(before).hexdigest()
    assert bytes(AdapterSnapshots(trainer.model).take().data) == before, "another process makes the same bytes of them"
    perturb(trainer, seed=1)
    assert bytes(first.data) == before, "training went on, the snapshot did not"
    assert snapshots.take().published(0).digest != first.published(0).digest
    assert all(parameter.requires_grad for parameter in lora_parameters(trainer))


@pytest.mark.long
def test_a_model_that_comes_to_its_gpu_later_is_copied_without_waiting(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where trainer and producers have the GPU in turns, the first snapshot is taken in host memory."""
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    copies, pinned = list[bool](), list[bool]()
    is_there = False
    zeros = torch.zeros

    def copy(targets: Any, sources: Any, non_blocking: bool) -> None:
        copies.append(non_blocking)

    def allocate(*size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return zeros(*size, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(snapshots_module, "lies_on_gpu", lambda parameters: is_there)
    snapshots = AdapterSnapshots(trainer.model)
    assert snapshots.take().copied is None
    is_there = True
    assert snapshots.take().copied is not None
    assert copies == [False, True]
    assert all(pinned)


@pytest.mark.long
def test_memory_is_used_again_after_its_release_and_not_before(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    snapshots = AdapterSnapshots(trainer.model)
    first, second = snapshots.take(), snapshots.take()
    addresses = [one.blob.data_ptr() for one in (first, second)]
    assert addresses[0] != addresses[1]
    second.release()
    perturb(trainer, seed=1)
    third = snapshots.take()
    assert third.blob.data_ptr() == addresses[1]
    weights = load(bytes(parse(third.data).safetensors))
    for parameter in lora_parameters(trainer):
        assert any(torch.equal(parameter, weight) for weight in weights.values())


@pytest.mark.long
def test_the_configuration_is_plain_json_for_inference(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    blob = parse(AdapterSnapshots(trainer.model).take().data)
    settings = json.loads(bytes(blob.config_json))
    assert settings["peft_type"] == "LORA"
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["inference_mode"] is True
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert len(settings["target_modules"]) == 2 * 7
