"""Runs of the trainer with adapters that vLLM cannot serve: what is published, kept, and taken up again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from consumer.learn.adapters import initial_adapter
from consumer.learn.options import build_arguments, build_lora, check_model
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.merging import BEGINNING_FILE, merged_weights
from consumer.link.weight_snapshots import WeightSnapshots
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.wire import weight_patch
from protocol.wire.weight_patch import parse
from slipstream import export
from tests.integration.models import build_model
from tests.unit.consumer.app.test_full_weights import FullRun
from tests.unit.consumer.builders import run_config
from tests.weight_patches import patch_between

METHODS: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_4"},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "modules_to_save": {"modules_to_save": ["norm"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head and embeddings are two tensors; the producer's tokens are those of its tokenizer."""
    return build_model("llama", tmp_path_factory.mktemp("llama") / "model", num_layers=1)


def settings(options: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    rates = {"max_steps": 3, "save_steps": 2, "learning_rate": 1e-2}
    return {"dtype": "bfloat16", "lora": options, "trainer": rates | trainer}


@pytest.mark.long
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_every_step_is_a_patch_and_a_stopped_run_goes_on_bit_for_bit(
    tmp_path: Path, model: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole = FullRun(tmp_path / "whole", model, **settings(options, beta=0.5))
    assert [version for version, _ in whole.published] == [0, 1, 2, 3]
    assert len({digest for _, digest in whole.published}) == 4
    assert parse(whole.blobs[0]).tensors == [], "version 0 is the checkpoint"
    last = {each.name: each for each in parse(whole.blobs[-1]).tensors}
    base = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).named_parameters())
    for each in merged_weights(whole.trainer.model):
        differs = each.now().to(torch.bfloat16).view(torch.int16) != base[each.name].view(torch.int16)
        assert last[each.name].num_changes == int(differs.sum())
    assert all(f"lora.{key}" in caplog.text for key in options)

    assert whole.steps[0]["kl"] == 0.0
    assert whole.steps[-1]["kl"] > 1e-3
    FullRun(tmp_path / "parts", model, stop_at=2, **settings(options, beta=0.5))
    resumed = FullRun(tmp_path / "parts", model, resume=True, **settings(options, beta=0.5))
    assert resumed.published == whole.published[2:]
    assert [step["kl"] for step in resumed.steps] == [step["kl"] for step in whole.steps]
    saved = load_file(resumed.config.checkpoints_dir / "checkpoint-2" / "adapter_model.safetensors")
    assert {each.dtype for each in saved.values()} == {torch.float32}
    begins = (resumed.config.checkpoints_dir / "checkpoint-2" / BEGINNING_FILE).exists()
    assert begins == ("init_lora_weights" in options)


@pytest.mark.long
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_what_is_exported_has_the_bits_that_were_published(
    tmp_path: Path, model: Path, options: dict[str, Any]
) -> None:
    run = FullRun(tmp_path / "run", model, **settings(options, max_steps=2))
    weight_patch.unpack(run.blobs[1], None, run.config.checkpoints_dir / "best")
    base = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).named_parameters())
    for which, version in (("2", 2), ("best", 1)):
        to = tmp_path / which
        assert export.run(run.config, [], which=which, to=to, repository=None) == 0
        exported = AutoModelForCausalLM.from_pretrained(to)
        assert exported.dtype == torch.bfloat16
        assert patch_between(base, dict(exported.named_parameters())) == parse(run.blobs[version])
    with pytest.raises(ConfigError, match=r"^--adapter: "):
        export.run(run.config, [], which="best", to=tmp_path / "alone", repository=None, is_adapter=True)
    if "init_lora_weights" in options:
        with pytest.raises(ConfigError, match=r"^--adapter: .*pissa"):
            export.run(run.config, [], which="2", to=tmp_path / "alone", repository=None, is_adapter=True)
    else:
        export.run(run.config, [], which="2", to=tmp_path / "alone", repository=None, is_adapter=True)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        last = load_file(tmp_path / "2" / "model.safetensors")
        for each in merged_weights(PeftModel.from_pretrained(plain, tmp_path / "alone")):
            assert torch.equal(each.now().to(torch.bfloat16), last[each.name])


@pytest.mark.long
def test_a_run_begins_at_an_adapter_and_measures_from_it(tmp_path: Path, model: Path) -> None:
    options = METHODS["use_dora"]
    before = FullRun(tmp_path / "before", model, **settings(options, max_steps=2))
    before.trainer.save_model(str(tmp_path / "adapter"))
    lora = build_lora(before.config)
    assert lora is not None
    initial = initial_adapter(str(tmp_path / "adapter"), lora)

    config = run_config(tmp_path / "after", model, **settings(options, beta=0.5))
    arguments = build_arguments(config, on_gpu=False, num_prompts=8)
    trainer = SlipstreamTrainer(config, arguments, lora, model, [], lambda *_: None)
    trainer.start_from(initial, resumed=False)
    snapshots = WeightSnapshots(trainer.model)
    assert bytes(snapshots.take().published(0).data) == before.blobs[-1], "version 0 is what the adapter was"
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter *= 1.5
    changed = snapshots.take().published(1)
    with trainer._reference:
        assert bytes(snapshots.take().published(2).data) == before.blobs[-1]
    assert snapshots.take().published(3).digest == changed.digest


@pytest.mark.long
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_the_probe_of_a_swap_is_that_of_the_published_weights(
    tmp_path: Path, model: Path, options: dict[str, Any]
) -> None:
    """The base is measured as the checkpoint, which the adapter has changed for PiSSA."""
    run = FullRun(tmp_path, model, **settings(options, max_steps=1), swap={"probe_every": 1})
    probe, found = run.probes[-1], []
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = torch.frombuffer(bytearray(probe.token_ids), dtype=torch.int32).view(-1, probe.row_length).long()
    parameters = dict(base.named_parameters())
    for _ in range(2):
        with torch.no_grad(), run.trainer.accelerator.autocast():
            logits = base(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        found.append(logits.gather(2, ids[:, 1:, None]).flatten())
        with torch.no_grad():
            for each in merged_weights(run.trainer.model):
                parameters[each.name].copy_(each.now())
    for bits, expected in zip((probe.base, probe.policy), found, strict=True):
        measured = torch.frombuffer(bytearray(bits), dtype=torch.float32)
        assert (measured - expected).abs().max() < 0.05
    assert (found[0] - found[1]).abs().max() > 0.05


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"dtype": "float32"}, "model.dtype: float32"),
        ({"swap": {"mode": "merged"}}, "swap.mode"),
        ({"swap": {"in_flight": "finish"}}, "swap.in_flight"),
        ({"engine": {"quantization": "fp8"}}, "engine.quantization"),
        ({"engine_server": {"url": "http://h:1", "adapter_dir": "/a"}}, "engine_server"),
        ({"pipeline": {"shard_base": "layers"}}, "pipeline.shard_base"),
        ({"trainable": ["*norm*"]}, "trainable"),
        ({"lora": {"use_dora": True, "target_parameters": ["experts.up"]}}, "target_parameters"),
        ({"lora": {"init_lora_weights": "pissa", "init_from": "folder"}}, "init_from"),
        ({"lora": {"init_lora_weights": "eva"}}, "init_lora_weights: eva"),
        ({"lora": {"init_lora_weights": "pissa_niter_x"}}, "init_lora_weights: pissa_niter_x"),
        ({"lora": {"bias": "all"}}, "bias: all"),
    ],
)
def test_what_does_not_go_with_a_merged_adapter_is_refused(
    sections: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        run_config(tmp_path, **({"dtype": "bfloat16", "lora": {"use_dora": True}} | sections))


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_the_keys_of_an_adapter_choose_how_policies_travel(tmp_path: Path, options: dict[str, Any]) -> None:
    config: RunConfig = run_config(tmp_path, dtype="bfloat16", lora=options)
    assert (config.weights, config.on_swap, config.max_lora_rank) == ("full", "continue", 0)
    assert config.merged_keys == tuple(options)
    served = run_config(tmp_path, dtype="bfloat16", lora={"use_rslora": True, "use_dora": False, "rank_pattern": {}})
    assert (served.weights, served.merged_keys, served.patched_by) == ("adapter", (), "")


def test_a_quantized_base_takes_up_no_adapter(tmp_path: Path) -> None:
    config: RunConfig = run_config(tmp_path, dtype="bfloat16", lora={"use_dora": True})
    quantized = config.model_copy(update={"model": config.model.model_copy(update={"quantization": "nf4"})})
    [problem] = quantized.problems()
    assert "model.quantization" in problem
    assert "remove lora.use_dora" in problem


@pytest.mark.parametrize("experts", [{"num_experts": 4}, {"num_local_experts": 4}])
def test_experts_are_refused_by_the_trainer_too(experts: dict[str, int]) -> None:
    arguments: Any = type("Arguments", (), {"cast_lm_head_to_fp32": False})
    shape: Any = type("Shape", (), experts)
    for key in ("lora: null", "lora.use_dora"):
        with pytest.raises(ConfigError, match=f"{key}: .*experts"):
            check_model(arguments, shape, patched_by=key)
    check_model(arguments, shape)
