"""What follows from `--gpu` and from the other sections, without vLLM."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from producer.engine.merged_worker import MergeWorker
from producer.engine.own_arguments import own_arguments, tensor_parallel_size
from producer.engine.patch_worker import PatchWorker
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.unit.protocol.gpu.models import SHAPES, write_model

FILE = "model.safetensors"
SHAPES_OF_LAYERS = {name.removesuffix(".weight"): shape for name, shape in SHAPES.items()}


def config_of(tmp_path: Path, *, engine: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(tmp_path),
            "model": {"path": "model"} | model,
            "dataset": {"path": "train.jsonl"},
            "rewards": {"functions": [{"function": "rewards:exact"}]},
            "engine": engine or {},
        }
    )


@pytest.mark.parametrize(
    ("targets", "served"),
    [
        (["q_proj", "self_attn.v_proj", "mlp.q_proj"], ["q_proj", "v_proj"]),
        ("all-linear", None),
        (r".*_proj", None),
        (None, None),
    ],
)
def test_vllm_serves_adapters_of_the_modules_alone_that_the_file_names(
    tmp_path: Path, targets: Any, served: list[str] | None
) -> None:
    config = RunConfig.model_validate(config_of(tmp_path).model_dump() | {"lora": {"target_modules": targets}})
    assert own_arguments(config, tmp_path, 1).get("lora_target_modules") == served
    merged = RunConfig.model_validate(config.model_dump() | {"swap": {"mode": "merged"}})
    assert "lora_target_modules" not in own_arguments(merged, tmp_path, 1)


def test_an_engine_that_exchanges_its_weights_has_no_adapters(tmp_path: Path) -> None:
    values = config_of(tmp_path).model_dump(exclude_unset=True)
    extensions = set()
    for sections in ({"swap": {"mode": "merged"}}, {"lora": None}):
        arguments = own_arguments(RunConfig.model_validate(values | sections), tmp_path, 1)
        assert (arguments["enable_lora"], "max_loras" in arguments) == (False, False)
        module, _, name = arguments["worker_extension_cls"].rpartition(".")
        extensions.add(getattr(importlib.import_module(module), name))
    assert extensions == {MergeWorker, PatchWorker}


@pytest.mark.parametrize(
    ("more", "is_known"),
    [({}, True), ({"model.layers.1.mlp.gate": (4, 8)}, False), ({"model.layers.1.mlp.experts.0.w1": (4, 8)}, False)],
)
def test_of_a_plain_decoder_all_linear_means_neither_embeddings_nor_the_head(
    tmp_path: Path, more: dict[str, tuple[int, int]], is_known: bool
) -> None:
    folder = write_model(tmp_path / "model")
    save_file({f"{name}.weight": np.zeros(shape) for name, shape in (SHAPES_OF_LAYERS | more).items()}, folder / FILE)
    served = own_arguments(config_of(tmp_path), folder, 1).get("lora_target_modules")
    attention, mlp = ["k_proj", "o_proj", "q_proj", "v_proj"], ["down_proj", "gate_proj", "up_proj"]
    assert served == (sorted(attention + mlp) if is_known else None)


def test_a_folder_that_cannot_be_read_leaves_it_to_vllm(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"nothing")
    assert "lora_target_modules" not in own_arguments(config_of(tmp_path), tmp_path, 1)


def test_an_engine_that_takes_turns_can_sleep(tmp_path: Path) -> None:
    assert "enable_sleep_mode" not in own_arguments(config_of(tmp_path), tmp_path, 1)
    config = RunConfig.model_validate(config_of(tmp_path).model_dump() | {"pipeline": {"gpu": "turns"}})
    assert own_arguments(config, tmp_path, 1)["enable_sleep_mode"]


@pytest.mark.parametrize(
    ("num_gpus", "parts", "size"),
    [(0, 1, 1), (1, 1, 1), (4, 1, 4), (4, 2, 2), (2, 2, 1), (8, 4, 2), (6, 3, 2), (0, 2, 1)],
)
def test_the_parts_of_the_pipeline_share_the_gpus(tmp_path: Path, num_gpus: int, parts: int, size: int) -> None:
    config = config_of(tmp_path, engine={"pipeline_parallel_size": parts})
    assert tensor_parallel_size(config, num_gpus) == size
    assert own_arguments(config, tmp_path, num_gpus)["tensor_parallel_size"] == size


@pytest.mark.parametrize(("num_gpus", "parts"), [(1, 2), (3, 2), (4, 3), (2, 4)])
def test_gpus_that_cannot_be_shared_equally_are_refused(tmp_path: Path, num_gpus: int, parts: int) -> None:
    config = config_of(tmp_path, engine={"pipeline_parallel_size": parts})
    with pytest.raises(
        ConfigError,
        match=f"engine.pipeline_parallel_size: {parts} groups of layers cannot share {num_gpus} GPUs equally; name {parts} GPUs",
    ):
        own_arguments(config, tmp_path, num_gpus)


@pytest.mark.parametrize("trusted", [True, False])
def test_files_of_the_model_run_where_the_model_section_says_so(tmp_path: Path, trusted: bool) -> None:
    ours = own_arguments(config_of(tmp_path, trust_remote_code=trusted), tmp_path, 1)
    assert ours["trust_remote_code"] is trusted
