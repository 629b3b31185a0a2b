"""What a model takes of a GPU, worked out by hand for one of 1,704 parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from protocol.errors import ConfigError
from protocol.gpu import memory as needs
from protocol.gpu.memory import (
    GIB,
    adapter_parameters,
    base_bytes,
    base_of,
    layer_bytes,
    needs_of,
    optimizer_bytes,
    pass_bytes,
    trainer_needs,
)
from protocol.gpu.model_files import ModelShape, model_shape
from protocol.gpu.weights import Weight, weights_of
from tests.unit.protocol.gpu.models import CONFIG, run_of, write_model


@pytest.fixture
def model(tmp_path: Path) -> ModelShape:
    return model_shape(write_model(tmp_path / "model"))


def test_the_folder_says_the_shapes(model: ModelShape) -> None:
    assert sum(weight.num_elements for weight in model.weights) == 1704
    assert (model.hidden_size, model.intermediate_size, model.num_layers, model.vocab_size) == (8, 16, 2, 32)
    assert (model.query_size, model.kv_size, model.max_length) == (8, 4, 64)
    assert {(weight.bits, weight.is_float) for weight in model.weights} == {(16, True)}


@pytest.mark.parametrize("in_parts", [False, True])
def test_weights_that_a_checkpoint_has_a_second_time_count_once(tmp_path: Path, *, in_parts: bool) -> None:
    folder = write_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "consolidated.safetensors")
    if in_parts:
        (folder / "model.safetensors").unlink()
        parts = {"model-1-of-2.safetensors": list(weights)[:5], "model-2-of-2.safetensors": list(weights)[5:]}
        for file, names in parts.items():
            save_file({name: weights[name] for name in names}, folder / file)
        index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sum(weight.num_elements for weight in weights_of(folder)) == 1704
    assert base_of(folder, "bfloat16", None) == 2 * 1704


def test_a_model_of_several_modalities_says_it_of_its_text_model(tmp_path: Path) -> None:
    """And leaves out what is a default of its architecture; towers are not loaded."""
    nested = '{"hidden_size": 99, "text_config": {"model_type": "x"}}'
    folder = write_model(tmp_path / "model", nested)
    tower = {"vision_tower.encoder.layers.7.self_attn.q_proj.weight": np.zeros((9, 9), np.float16)}
    save_file(tower, folder / "tower.safetensors")
    plain = model_shape(write_model(tmp_path / "plain"))
    assert model_shape(folder) == replace(plain, max_length=None)
    trainer, engine = needs_of(run_of(folder), folder)
    assert (trainer.least_tokens, engine.cache) == (10, 3 * 10 * 32)


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        (
            '{"vocab_size": 8}',
            b"\x36" + bytes(7) + b'{"a": {"dtype":"I8","shape":[],"data_offsets":[0, 1]}}' + b"0",
            "weights say the hidden size",
        ),
        ("[", b"", "config.json cannot be read"),
        pytest.param("[" * 100_000, b"", "config.json cannot be read", id="nested"),
        (CONFIG, b"\xff" * 64, "model.safetensors is no file of safetensors"),
        (CONFIG, b"\x02", "model.safetensors is no file of safetensors"),
        (CONFIG, b"\x02" + bytes(7) + b"[]", "model.safetensors has a damaged header"),
        (CONFIG, None, r"has no \*.safetensors"),
    ],
)
def test_a_folder_that_does_not_say_it_is_refused(
    tmp_path: Path, config: str, weights: bytes | None, said: str
) -> None:
    folder = write_model(tmp_path / "model", config)
    if weights is None:
        (folder / "model.safetensors").unlink()
    elif weights:
        (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match=f"{said}.*set pipeline.gpu: own"):
        model_shape(folder)


@pytest.mark.parametrize(
    ("dtype_bytes", "quantization", "expected"),
    [
        (4, None, 6816),
        (2, None, 3408),
        (2, "nf4", 1752),  # 1,152 in linear layers at 0.5625, 552 others at 2
        (2, "int8", 2768),  # 1,152 at 1 and 128 rows at 4; 552 others at 2
    ],
)
def test_the_base(model: ModelShape, dtype_bytes: int, quantization: str | None, expected: int) -> None:
    assert base_bytes(model.weights, dtype_bytes, quantization) == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", 512),  # the sides of the seven matrices of a layer sum to 128
        (["q_proj", "v_proj"], 112),  # 16 and 12
        (r".*\.0\.mlp\..*", 144),  # 24 three times, in one layer
        (["proj"], 0),
    ],
)
def test_the_adapter(model: ModelShape, targets: str | list[str], expected: int) -> None:
    assert adapter_parameters(model.weights, 2, targets) == expected


def test_an_adapter_that_the_trainer_merges(model: ModelShape, tmp_path: Path) -> None:
    """16 more for each q_proj, 64 magnitudes of rows in each layer, and 256 weights of the head."""
    merged = {"use_dora": True, "rank_pattern": {"q_proj": 3}, "modules_to_save": ["lm_head"]}
    plain, more = (
        trainer_needs(run_of(tmp_path / "model", pipeline={}, lora={"r": 2} | options), model)
        for options in ({}, merged)
    )
    assert plain.trained == 512 * 16
    assert more.trained == (512 + 2 * 16 + 2 * 64 + 256) * 16
    assert more.base == plain.base


def test_the_optimizer() -> None:
    names = ("", "adamw_torch_fused", "adamw_8bit", "lion_8bit", "ademamix", "adafactor", "sgd", "paged_adamw_32bit")
    assert [optimizer_bytes(name) for name in names] == [8, 8, 2, 1, 12, 0, 0, 0]
    assert [optimizer_bytes(name, "momentum=0.9") for name in ("sgd", "rmsprop")] == [4, 8]


def test_a_pass(model: ModelShape) -> None:
    # A layer keeps 8 * 8 + 2 * (6 * 8 + 4 * 16) = 288 bytes of a token, the head 64, and 320 logits take 4 bytes each.
    assert pass_bytes(model, 10, 2, recomputes=False) == 8832  # 1.15 * (10 * 640 + 1280)
    # Dropout: seven inputs of 64 values in all, with 2 bytes for the mask and 2 for the result.
    assert layer_bytes(model, 2, drops=True) == layer_bytes(model, 2, drops=False) + 4 * 64 == 544
    # With checkpointing 16 bytes for the input of each layer, and one whole layer.
    assert pass_bytes(model, 10, 2, recomputes=True) == 5888  # 1.15 * (10 * 384 + 1280)


def test_a_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    trainer, engine = needs_of(run_of(folder), folder)
    assert (trainer.base, trainer.trained) == (3408, 512 * 16)
    assert (trainer.tokens, trainer.least_tokens) == (16384, 10)  # a prompt of 4 and a completion of 6
    assert trainer.least == 3408 + 8192 + 5888
    # Three LoRA slots of rank 8, the least that vLLM serves; a token has 2 * 2 * 1 * 4 values of 2 bytes, and a context of 64 is
    # more than a group of 3 * 10.
    assert (engine.weights, engine.adapters, engine.cache) == (3408, 3 * 4096, 64 * 32)
    assert engine.least == 3408 + 12288 + 2048 + 3 * GIB // 2


@pytest.mark.parametrize(
    ("trainer", "bytes_each"),
    [({}, 16), ({"optim": "sgd"}, 8), ({"optim": "adamw_8bit"}, 10)],
)
@pytest.mark.parametrize(("trainable", "num_trained"), [([], 1704), (["*norm.weight", "lm_head.*"], 40 + 256)])
def test_weights_that_train(
    tmp_path: Path, trainer: dict[str, Any], bytes_each: int, trainable: list[str], num_trained: int
) -> None:
    """Weight and gradient in float32, and the state. An optimizer of 8 bits keeps that of 256 weights of embeddings in
    float32."""
    folder = write_model(tmp_path / "model")
    found, engine = needs_of(run_of(folder, lora=None, trainable=trainable, trainer=trainer), folder)
    more = 256 * 6 if trainer.get("optim") == "adamw_8bit" and not trainable else 0
    assert (found.base, found.trained) == (4 * (1704 - num_trained), num_trained * bytes_each + more)
    # In float32 a layer keeps 8 * 8 + 4 * (6 * 8 + 4 * 16) = 512 bytes of a token, its input 32, the head 96, and 320 logits take
    # 8 bytes each: 1.15 * (10 * (512 + 2 * 32 + 96) + 2560). Autocast adds 2 bytes for each weight that trains.
    assert found.least_passes == 10672 + 2 * num_trained
    assert (engine.weights, engine.adapters) == (3408, 0)


@pytest.mark.parametrize(
    ("trainer", "sections", "num_float32"),
    [
        ({}, {}, 296),  # 256 of embeddings and 40 of norms
        ({"cast_lm_head_to_fp32": True}, {}, 296 + 256),
        ({}, {"trainable": ["*norm.weight", "lm_head.*"]}, 40),
        ({"bf16": False}, {}, 1704),
    ],
)
def test_the_weights_of_before(
    model: ModelShape, tmp_path: Path, trainer: dict[str, Any], sections: dict[str, Any], num_float32: int
) -> None:
    """With a KL term linear layers are kept in 2 bytes each, and the rest in 4."""
    without, found = (
        trainer_needs(run_of(tmp_path / "model", lora=None, trainer=trainer | {"beta": beta}, **sections), model)
        for beta in (0.0, 0.1)
    )
    num_trained = 296 if sections else 1704
    assert found.trained - without.trained == 4 * num_float32 + 2 * (num_trained - num_float32)


def test_gradients_that_ranks_add_up_are_in_one_tensor(tmp_path: Path) -> None:
    """That of 16,000,000 is larger than what a pass of 10 tokens takes."""
    model = model_shape(write_model(tmp_path / "model"))
    large = replace(model, weights=(*model.weights, Weight("model.large.weight", (16_000_000,), 16)))
    config = run_of(tmp_path / "model", lora=None, pipeline={"shard_base": "none"}, trainable=["model.large.*"])
    alone, found = trainer_needs(config, large), trainer_needs(config, large, 2)
    assert (alone.least_passes, found.least_passes) == (10672 + 2 * 16_000_000, 4 * 16_000_000)
    assert (found.base, found.trained) == (alone.base, alone.trained)


@pytest.mark.parametrize(("beta", "bytes_each"), [(0.0, 16), (0.1, 20)])
def test_weights_that_ranks_share(model: ModelShape, tmp_path: Path, beta: float, bytes_each: int) -> None:
    """A fifth of 1,704 parameters each; the reference policy is in float32. 520 of them lie around two layers of 592. A pass has
    the former three times in float32, and of a layer twice 16 bits, a gradient of 16 bits and one of 32."""
    config = run_of(tmp_path / "model", lora=None, trainer={"beta": beta})
    alone, found = trainer_needs(config, model), trainer_needs(config, model, 5)
    assert (found.base, found.trained) == (0, 1704 * bytes_each // 5)
    assert found.passes - alone.passes == 12 * 520 + 10 * 592 - 2 * 1704
    whole = run_of(tmp_path / "model", lora=None, trainer={"beta": beta}, pipeline={"shard_base": "none"})
    assert trainer_needs(whole, model, 5) == trainer_needs(whole, model)


@pytest.mark.parametrize(
    ("targets", "sides"),
    [("all-linear", 256), (r".*\.0\.mlp\..*", 256), (["down_proj"], 48), (["self_attn.q_proj", "v_proj"], 80)],
)
def test_slots_of_the_engine_hold_what_vllm_serves(tmp_path: Path, targets: str | list[str], sides: int) -> None:
    """Clients have slots, too, and a fused layer is served as a whole: here queries, keys and values."""
    folder = write_model(tmp_path / "model")
    lora, serve = {"r": 2, "lora_alpha": 4, "target_modules": targets}, {"enabled": True, "max_versions": 2}
    _, engine = needs_of(run_of(folder, lora=lora, serve=serve), folder)
    assert engine.adapters == (3 + 4) * 8 * sides * 2


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"pipeline": {"trainer_tokens_per_micro_batch": 100}}, (100, 100)),
        ({"pipeline": {"trainer_tokens_per_micro_batch": 5}}, (10, 10)),  # a longer row goes alone
        ({"engine": {"max_model_len": 8}}, (16384, 8)),
        ({"engine": {"max_model_len": "auto"}}, (16384, 10)),
    ],
)
def test_tokens_of_a_pass(tmp_path: Path, sections: dict[str, object], expected: tuple[int, int]) -> None:
    folder = write_model(tmp_path / "model")
    trainer, _ = needs_of(run_of(folder, **sections), folder)
    assert (trainer.tokens, trainer.least_tokens) == expected


def test_an_engine_of_other_formats(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    engine = {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_model_len": 20}
    _, found = needs_of(run_of(folder, engine=engine, swap={"mode": "adapter", "probe_tolerance": 0.1}), folder)
    assert (found.weights, found.cache) == (852, 30 * 16)  # at least half a byte per weight; a group of 30 tokens
    _, merged = needs_of(run_of(folder, swap={"mode": "merged"}), folder)
    assert merged.adapters == 0


def test_seven_billion_parameters_and_their_orders_of_magnitude() -> None:
    """Qwen2.5-7B: 28 layers of 3,584 and 18,944, and passes of 16,384 tokens."""
    shape = ModelShape((), 3584, 18944, 28, 3584, 512, 152064, 32768)
    assert 8 < pass_bytes(shape, 16384, 2, recomputes=True) / GIB < 11
    assert 90 < pass_bytes(shape, 16384, 2, recomputes=False) / GIB < 120
    assert needs.longest_row(run_of(Path("/models/seven")), shape) == 10
