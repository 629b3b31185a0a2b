"""Runs of the trainer in which the weights themselves train: what is published, kept and written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from consumer.learn.model import save_weights
from consumer.link import patch_maker
from consumer.waiting import StopRequested
from protocol.config.loader import dump_config, load_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.weights import weights_of
from protocol.wire.weight_patch import anchor_of, parse
from tests.integration.models import build_model
from tests.unit.consumer.app.test_run import Run
from tests.unit.consumer.builders import run_config

FULL: dict[str, Any] = {"lora": None, "dtype": "bfloat16"}


class FullRun(Run):
    def publish(self, policy: Any) -> None:
        self.blobs = [*getattr(self, "blobs", []), bytes(policy.data)]
        super().publish(policy)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, one_layer_model: Path) -> FullRun:
    return FullRun(tmp_path_factory.mktemp("run"), one_layer_model, **FULL, trainer={"max_steps": 4, "save_steps": 2})


@pytest.mark.long
def test_every_parameter_trains_in_float32_and_every_step_is_a_patch_of_the_base(
    uninterrupted: FullRun, one_layer_model: Path
) -> None:
    run = uninterrupted
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4]
    assert parse(run.blobs[0]).tensors == [], "version 0 is the base"
    model = run.trainer.model
    base = AutoModelForCausalLM.from_pretrained(one_layer_model, dtype=torch.bfloat16)
    trained, before = dict(model.named_parameters()), dict(base.named_parameters())
    assert all(each.dtype == torch.float32 and each.requires_grad for each in trained.values())
    last = {each.name: each for each in parse(run.blobs[-1]).tensors}
    for name, parameter in trained.items():
        bits = parameter.detach().bfloat16().view(torch.int16).numpy().view(np.uint16)
        num_changed = int((before[name].detach().bfloat16().view(torch.int16).numpy().view(np.uint16) != bits).sum())
        assert num_changed == (last[name].num_changes if name in last else 0)
        assert name not in last or last[name].sum == bits.sum(dtype=np.uint64)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= last.keys()


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, one_layer_model: Path, uninterrupted: FullRun
) -> None:
    settings = FULL | {"trainer": {"max_steps": 4, "save_steps": 2}}
    FullRun(tmp_path, one_layer_model, stop_at=2, **settings)
    resumed = FullRun(tmp_path, one_layer_model, resume=True, **settings)
    assert [version for version, _ in resumed.published] == [2, 3, 4]
    assert resumed.published == uninterrupted.published[2:]


@pytest.mark.long
def test_a_run_that_goes_on_patches_the_same_anchors(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up makes the later steps larger. One checkpoint is of the step that made an anchor, the other of the next one."""
    monkeypatch.setattr(patch_maker, "MOST_GROWTH", 1.2)
    trainer = {"max_steps": 6, "save_steps": 1, "learning_rate": 1e-5, "warmup_steps": 6}
    settings = FULL | {"trainer": trainer}
    whole = FullRun(tmp_path / "whole", one_layer_model, **settings)
    anchors = [anchor_of(blob) for blob in whole.blobs]
    digests = [digest for _, digest in whole.published]
    assert anchors[4] == digests[3]
    assert anchors[:4] == [""] * 4
    assert len(set(anchors)) == 3, "there are two anchors"
    assert all(not anchor or not anchors[digests.index(anchor)] for anchor in anchors), (
        "which were published, and have none"
    )
    for step in (3, 4):
        folder = tmp_path / f"parts-{step}"
        FullRun(folder, one_layer_model, stop_at=step, **settings)
        resumed = FullRun(folder, one_layer_model, resume=True, **settings)
        assert resumed.blobs == whole.blobs[step:]


@pytest.mark.long
def test_a_stop_while_the_journal_has_no_room_leaves_no_rank_alone_in_a_snapshot(
    tmp_path: Path, one_layer_model: Path
) -> None:
    """The other ranks gather the weights when a step ends, whatever holds up this one."""
    taken: list[int] = []

    class Stopped(FullRun):
        def prepare(self) -> None:
            end_step, snapshots = self.run.end_step, self.run._snapshots
            take = snapshots.take

            def end(step: int, plan: Any) -> None:
                if step == 2:
                    raise StopRequested
                end_step(step, plan)

            def counted(probe: Any) -> Any:
                taken.append(self.trainer.state.global_step)
                return take(probe)

            self.run.end_step, snapshots.take = end, counted  # type: ignore[method-assign, assignment]

    with pytest.raises(StopRequested):
        Stopped(tmp_path, one_layer_model, **FULL)
    assert taken == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit", "lion_8bit"])
def test_a_run_of_another_optimizer_goes_on_bit_for_bit(tmp_path: Path, one_layer_model: Path, optimizer: str) -> None:
    if optimizer.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    settings = FULL | {"trainer": {"max_steps": 3, "save_steps": 2, "optim": optimizer, "learning_rate": 1e-3}}
    whole = FullRun(tmp_path / "whole", one_layer_model, **settings)
    FullRun(tmp_path / "parts", one_layer_model, stop_at=2, **settings)
    resumed = FullRun(tmp_path / "parts", one_layer_model, resume=True, **settings)
    assert resumed.published == whole.published[2:]
    assert len({digest for _, digest in whole.published}) == 4


@pytest.mark.long
def test_a_run_that_goes_on_measures_from_the_base_too(tmp_path: Path, one_layer_model: Path) -> None:
    settings = FULL | {"trainer": {"max_steps": 3, "save_steps": 1, "beta": 0.5, "learning_rate": 1e-2}}
    whole = FullRun(tmp_path / "whole", one_layer_model, **settings)
    FullRun(tmp_path / "parts", one_layer_model, stop_at=2, **settings)
    resumed = FullRun(tmp_path / "parts", one_layer_model, resume=True, **settings)
    assert resumed.published == whole.published[2:]
    assert [step["kl"] for step in resumed.steps] == [step["kl"] for step in whole.steps]
    assert whole.steps[-1]["kl"] > 1e-3


@pytest.mark.long
def test_only_named_parameters_train(tmp_path: Path, one_layer_model: Path) -> None:
    run = FullRun(tmp_path, one_layer_model, **FULL, trainable=["*norm*"], trainer={"max_steps": 1})
    names = {name for name, each in run.trainer.model.named_parameters() if each.requires_grad}
    of_layer = ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight")
    assert names == {*of_layer, "model.norm.weight"}
    assert {each.name for each in parse(run.blobs[-1]).tensors} <= names
    with pytest.raises(ConfigError, match=r"trainable: .*'nothing'"):
        FullRun(tmp_path / "other", one_layer_model, **FULL, trainable=["nothing"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options", "trainable"),
    [
        ("qwen2", {}, []),
        ("llama", {}, []),
        ("llama", {"bf16": False}, ["*mlp*"]),
        ("llama", {"cast_lm_head_to_fp32": True}, []),
    ],
)
def test_the_kl_term_measures_from_the_base(
    tmp_path: Path, family: str, options: dict[str, Any], trainable: list[str]
) -> None:
    """Head and embeddings are one tensor or two; passes have autocast or not, or the head alone has none."""
    model = build_model(family, tmp_path / "model", num_layers=1)
    trainer = {"max_steps": 3, "beta": 0.5, "learning_rate": 1e-2} | options
    run = FullRun(tmp_path / "run", model, **FULL, trainable=trainable, trainer=trainer)
    kl = [step["kl"] for step in run.steps]
    assert kl[0] == 0.0
    assert kl[-1] > 1e-3
    assert all(each.dtype == torch.float32 for each in run.trainer.model.parameters())


@pytest.mark.long
def test_the_final_model_is_what_was_published(uninterrupted: FullRun, tmp_path: Path, one_layer_model: Path) -> None:
    save_weights(uninterrupted.trainer.base, uninterrupted.trainer.processing_class, str(tmp_path / "model"))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert written.dtype == torch.bfloat16
    trained = dict(uninterrupted.trainer.model.named_parameters())
    assert all(torch.equal(each, trained[name].bfloat16()) for name, each in written.named_parameters())
    assert written.config.use_cache, "training does without, and generation must not"
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    names = {weight.name for weight in weights_of(tmp_path / "model")}
    assert names == {weight.name for weight in weights_of(one_layer_model)}, "head and embeddings are written once"


@pytest.mark.long
def test_recomputed_layers_give_the_same_bits(tmp_path: Path, one_layer_model: Path, uninterrupted: FullRun) -> None:
    trainer = {"max_steps": 4, "save_steps": 2, "gradient_checkpointing": True}
    assert FullRun(tmp_path, one_layer_model, **FULL, trainer=trainer).published == uninterrupted.published


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"dtype": "float32"}, "model.dtype: float32"),
        ({"swap": {"mode": "merged"}}, "swap.mode"),
        ({"swap": {"in_flight": "finish"}}, "swap.in_flight"),
        ({"engine": {"quantization": "fp8"}}, "engine.quantization"),
        ({"engine_server": {"url": "http://h:1", "adapter_dir": "/a"}}, "engine_server"),
        ({"pipeline": {"shard_base": "layers"}, "trainer": {"optim": "adafactor"}}, "trainer.optim: adafactor"),
        ({"pipeline": {"shard_base": "layers"}, "trainer": {"fp16": True}}, "trainer.fp16"),
    ],
)
def test_what_does_not_go_with_full_weights_is_refused(sections: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        run_config(tmp_path, **(FULL | sections))


def test_a_configuration_that_was_written_out_is_the_same_one(tmp_path: Path) -> None:
    """Ranks and commands read it so, with every default as if it were set."""
    config: RunConfig = run_config(tmp_path, **FULL, trainable=["*norm*"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    (tmp_path / "run.yaml").write_text(dump_config(config))
    read = load_config(str(tmp_path / "run.yaml"))
    assert (read.weights, read.trainable) == ("full", ["*norm*"])


def test_parameters_are_chosen_without_an_adapter_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainable"):
        run_config(tmp_path, trainable=["*norm*"])


def test_a_policy_has_no_adapter_and_goes_on_by_default(tmp_path: Path) -> None:
    config: RunConfig = run_config(tmp_path, **FULL)
    assert (config.weights, config.on_swap, config.max_lora_rank) == ("full", "continue", 0)


@pytest.mark.parametrize(
    ("written", "weights"), [("lora: null", "full"), ("lora: ~", "full"), ("lora:", "adapter"), ("", "adapter")]
)
def test_nothing_below_a_section_is_no_null(tmp_path: Path, written: str, weights: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "run_dir: run\nmodel: {path: model}\ndataset: {path: rows.jsonl}\nrewards: {functions: [{function: numeric_match}]}\n"
        + written
    )
    assert load_config(str(file)).weights == weights
    assert load_config(str(file), ["lora=null"]).weights == "full"
