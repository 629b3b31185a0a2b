"""Where the base is loaded, what is refused for its size, and what an error of loading it ends the trainer with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from consumer.learn import model as base_loading
from consumer.learn.model import MORE_ROOM, check_base_fits, loading
from consumer.learn.options import build_arguments, build_lora
from consumer.ranks.exchange import OneRank
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError
from protocol.gpu.memory import GIB, base_of
from slipstream.sft import build_sft_arguments
from tests.unit.consumer.builders import run_config

TINY_BYTES = 120_000  # less than the tiny model takes in float32


class Several(OneRank):
    world = 2


class Asked(Exception):
    """The base would be loaded now."""


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options with which transformers is asked for the base, in place of loading it. The GPU has room for everything."""
    found: list[Any] = []

    def load(folder: Path, **options: Any) -> None:
        found.append(options)
        raise Asked

    monkeypatch.setattr(base_loading, "load_model", load)
    monkeypatch.setattr(base_loading, "room_of_gpu", lambda device: (80 * GIB, 80 * GIB))
    return found


def build(folder: Path, model: Path, *, ranks: Any = None, on_gpu: bool = True, **pipeline: Any) -> None:
    build_run(run_config(folder, model, pipeline={"groups_per_step": 2} | pipeline), model, ranks=ranks, on_gpu=on_gpu)


def build_run(config: RunConfig, model: Path, *, ranks: Any = None, on_gpu: bool = True) -> None:
    options = build_arguments(config, on_gpu=on_gpu, num_prompts=8)
    with pytest.raises(Asked):
        base_loading.load_policy(config, options, build_lora(config), model, ranks or OneRank(), pad_token_id=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"": 0}),
        ({"gpu": "shared"}, {"": 0}),
        ({"gpu": "turns"}, None),
        ({"ranks": Several()}, None),
        ({"on_gpu": False}, None),
    ],
)
def test_no_library_chooses_where_the_base_goes(
    tmp_path: Path, tiny_model: Path, asked: list[Any], options: dict[str, Any], expected: Any
) -> None:
    build(tmp_path, tiny_model, **options)
    assert asked == [{"trust_remote_code": False, "device_map": expected, "dtype": "float32"}]


def test_a_warm_start_is_loaded_to_its_gpu(tmp_path: Path) -> None:
    for on_gpu, expected in ((True, {"": 0}), (False, None)):
        arguments = build_sft_arguments(run_config(tmp_path), tmp_path, on_gpu=on_gpu)
        assert arguments.model_init_kwargs["device_map"] == expected


def test_a_base_without_room_is_refused_before_it_is_loaded(
    tmp_path: Path, tiny_model: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_loading, "room_of_gpu", lambda device: (TINY_BYTES, 80 * GIB))
    with pytest.raises(DeviceError, match=r"model.path.*model.quantization.*pipeline.shard_base"):
        build(tmp_path, tiny_model)
    with pytest.raises(DeviceError, match=r"pipeline\.shard_base"):
        build(tmp_path, tiny_model, ranks=Several(), shard_base="none")
    assert asked == []
    build(tmp_path, tiny_model, ranks=Several())  # who may spread it over the GPUs
    build(tmp_path, tiny_model, gpu="turns")  # for which it is loaded in host memory
    build(tmp_path, tiny_model, on_gpu=False)
    assert len(asked) == 3


def test_weights_that_train_take_four_bytes_each_on_every_rank(
    tmp_path: Path, tiny_model: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank keeps a part of them with `shard_base: none`, so each must have room for all."""
    needed = base_of(tiny_model, "float32", None)
    for ranks, choice in ((OneRank(), "auto"), (Several(), "none")):
        sections = {"lora": None, "trainer": {"bf16": False}, "pipeline": {"shard_base": choice}}
        config = run_config(tmp_path, tiny_model, "bfloat16", **sections)
        monkeypatch.setattr(base_loading, "room_of_gpu", lambda device: (needed - 1, 80 * GIB))
        with pytest.raises(DeviceError, match=r"model.path"):
            build_run(config, tiny_model, ranks=ranks)
        monkeypatch.setattr(base_loading, "room_of_gpu", lambda device: (needed, 80 * GIB))
        build_run(config, tiny_model, ranks=ranks)
    assert [each["dtype"] for each in asked] == ["float32"] * 2


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_of_the_lm_head_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    config = run_config(tmp_path, tiny_model, lora={"target_modules": ["lm_head"]}, swap={"probe_every": 0})
    options = build_arguments(config, on_gpu=False, num_prompts=8)
    with pytest.raises(ConfigError, match=r"lora.target_modules: .*leave it out"):
        base_loading.load_policy(config, options, build_lora(config), tiny_model, pad_token_id=0)


@pytest.mark.long
def test_weights_that_are_not_in_the_files_are_named_and_not_drawn(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^model.path: {folder} lacks 1 weights .* {name}; "):
        base_loading.load_model(folder, dtype=torch.float32)


@pytest.mark.long
def test_weights_of_other_shapes_are_named(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    said = rf"^model.path: {folder}/config.json does not fit .*mlp.down_proj.weight: .*, 24\]; "
    with pytest.raises(ConfigError, match=said):
        base_loading.load_model(folder, dtype=torch.float32)


def test_a_refusal_names_all_sizes() -> None:
    with pytest.raises(DeviceError, match=r"81.0 GiB.*80.0 GiB of 80.0 GiB.*take another one"):
        check_base_fits(81 * GIB, "take another one")


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), DeviceError, "Tried.*shard_base"),
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceError, "shard_base"),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), DeviceError, "uncorrectable"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"), DeviceError, "12 bytes"),
        (ValueError("target modules not found"), ConfigError, "refused: tests: target modules"),
        (RuntimeError("size mismatch for q_proj"), ConfigError, "refused: tests: size mismatch"),
    ],
)
def test_what_an_error_of_loading_means(error: Exception, expected: type[Exception], words: str) -> None:
    with pytest.raises(expected, match=words), loading("refused"):
        raise error


def test_a_lost_rank_is_left_to_those_who_know_it() -> None:
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(RuntimeError) as caught, loading("refused"):
        raise broken
    assert caught.value is broken


def test_memory_that_a_library_was_refused_without_saying_so_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([3, 4])
    monkeypatch.setattr(base_loading, "num_refusals", lambda: next(refusals))
    with pytest.raises(DeviceError, match="some issues"), loading("refused", MORE_ROOM):
        raise RuntimeError("We encountered some issues during automatic conversion of the weights.")
