"""Where the base is loaded, what is refused for its size, and what an error of loading it ends the trainer with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.ranks.exchange import OneRank
from consumer.training import base_loading
from consumer.training.base_loading import MORE_ROOM, check_base_fits, loading
from consumer.training.trainer import SlipstreamTrainer
from consumer.training.trl_arguments import build_arguments, build_lora
from consumer.training.trl_loss import StepLossTrainer
from protocol.errors import ConfigError, DeviceError
from protocol.gpu.memory import GIB
from slipstream.sft import build_sft_arguments
from tests.unit.consumer.builders import run_config

TINY_BYTES = 120_000  # less than the tiny model takes in float32


class Several(OneRank):
    world = 2


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `model_init_kwargs` with which TRL is asked to load a model, in place of doing so. The GPU has room for everything."""
    found: list[Any] = []
    monkeypatch.setattr(
        StepLossTrainer, "__init__", lambda self, *_, args, **options: found.append(args.model_init_kwargs)
    )
    monkeypatch.setattr(base_loading, "room_of_gpu", lambda device: (80 * GIB, 80 * GIB))
    return found


def build(folder: Path, model: Path, *, ranks: Any = None, on_gpu: bool = True, **pipeline: Any) -> None:
    config = run_config(folder, model, pipeline={"groups_per_step": 2} | pipeline)
    arguments = build_arguments(config, on_gpu=on_gpu, num_prompts=8)
    with pytest.raises(AttributeError):  # the trainer goes on without TRL's constructor
        SlipstreamTrainer(config, arguments, build_lora(config), model, [], lambda *_: None, ranks or OneRank())


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
    assert asked == [{"dtype": "float32", "device_map": expected}]


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
        (ValueError("target modules not found"), ConfigError, "refused: target modules"),
        (RuntimeError("size mismatch for q_proj"), ConfigError, "refused: size mismatch"),
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
