"""Sections of libraries, checked against the real vLLM."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from protocol.config.library_section import build
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.integration.models import build_model, build_model_with_code
from tests.unit.protocol.config.test_library_section import refusal

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def test_vllm_engine_arguments(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.engine.arg_utils import AsyncEngineArgs

    values = {
        "max_model_len": 128,
        "gpu_memory_utilization": "0.5",
        "enforce_eager": True,
        "kv_cache_dtype": "auto",
        "quantization": "fp8",
        "limit_mm_per_prompt": {"image": 0},
        "hf_overrides": {"a": 1},
        "compilation_config": {"cudagraph_capture_sizes": [1, 2]},
        "load_format": "dummy",
    }
    built = build("engine", AsyncEngineArgs, values, model=str(tmp_path))
    assert (built.max_model_len, built.gpu_memory_utilization, built.enforce_eager) == (128, 0.5, True)
    assert (built.kv_cache_dtype, built.quantization, built.load_format) == ("auto", "fp8", "dummy")
    assert (built.limit_mm_per_prompt, built.hf_overrides) == ({"image": 0}, {"a": 1})
    assert built.compilation_config.cudagraph_capture_sizes == [1, 2]
    assert built.model == str(tmp_path)
    built = build("engine", AsyncEngineArgs, {"attention_backend": "FLASH_ATTN"}, model=str(tmp_path))
    assert built.attention_backend.name == "FLASH_ATTN"
    said = refusal("engine", AsyncEngineArgs, {"max_model_length": 1}, model=str(tmp_path))
    assert said.startswith("engine.max_model_length: ")
    assert said.endswith("max_model_len")
    for key, value in [
        ("max_model_len", "abc"),
        ("enforce_eager", "perhaps"),
        ("max_num_seqs", 1.5),
        ("kv_cache_dtype", "int3"),
        ("compilation_config", {"levle": 0}),
    ]:
        assert refusal("engine", AsyncEngineArgs, {key: value}, model=str(tmp_path)).startswith(f"engine.{key}: ")


def test_limits_of_a_batch_are_those_of_vllm_serve_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine import arg_utils

    from producer.engine.configuration import build_vllm_config

    def of_an_h100(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            platform = type(arg_utils.current_platform)
            patched.setattr(platform, "get_device_total_memory", classmethod(lambda *_: 80 * 2**30))
            patched.setattr(platform, "get_device_name", classmethod(lambda *_: "NVIDIA H100 80GB HBM3"))
            patched.setattr(platform, "is_cpu", lambda _: False)
            return defaults(*arguments)

    defaults = arg_utils.EngineArgs.get_batch_defaults
    monkeypatch.setattr(arg_utils.AsyncEngineArgs, "get_batch_defaults", staticmethod(of_an_h100))
    folder = build_model("llama", tmp_path / "model", num_layers=1)
    for engine, num_seqs in (({}, 1024), ({"max_num_seqs": 256}, 256)):
        config = run_config(tmp_path, model={"path": str(folder)}, engine=engine | {"max_model_len": 64})
        scheduler = build_vllm_config(config, folder, num_gpus=0).scheduler_config
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (num_seqs, 8192)


def test_a_model_with_python_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads it where `model.trust_remote_code` says so, and the GPUs are shared by the parts of a pipeline."""
    from .engines import check_engine_section

    modules = str(tmp_path / "modules")
    monkeypatch.setenv("HF_MODULES_CACHE", modules)  # for processes that vLLM starts
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    model = {"path": str(build_model_with_code(tmp_path / "with_code")), "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"model.path: .* set model.trust_remote_code=true to run them"):
        check_engine_section(run_config(tmp_path, model=model))
    engine = {"max_model_len": 64, "enforce_eager": True, "pipeline_parallel_size": 2}
    check_engine_section(run_config(tmp_path, model=model | {"trust_remote_code": True}, engine=engine))


def run_config(run_dir: Path, **sections: Any) -> RunConfig:
    rewards = {"functions": [{"function": "rewards:exact"}]}
    return RunConfig.model_validate(
        {"run_dir": str(run_dir), "dataset": {"path": "rows.jsonl"}, "rewards": rewards, **sections}
    )


def test_loras_in_float32_are_refused_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would start, and its core die of the first request with an adapter: its kernels assert 16 bits."""
    from producer.engine import configuration as vllm_config

    folder = build_model("qwen2", tmp_path / "model")

    def built(dtype: str, mode: str) -> Any:
        model, engine = {"path": str(folder), "dtype": dtype}, {"max_model_len": 64, "enforce_eager": True}
        config = run_config(tmp_path, model=model, swap={"mode": mode}, engine=engine)
        return vllm_config.build_vllm_config(config, folder, 1)

    assert built("float32", "adapter").lora_config is not None, "on a CPU they compute in float32"
    on_gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr(vllm_config, "current_platform", on_gpu)
    with pytest.raises(ConfigError, match=r"^model\.dtype: float32 cannot be used on a GPU with swap\.mode: adapter"):
        built("float32", "adapter")
    assert built("bfloat16", "adapter").lora_config is not None
    assert built("float32", "merged").lora_config is None


def test_an_engine_that_cannot_sleep_takes_no_turns_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from producer.engine import configuration as vllm_config

    folder = build_model("qwen2", tmp_path / "model")
    model, engine = {"path": str(folder), "dtype": "bfloat16"}, {"max_model_len": 64, "enforce_eager": True}

    def refusal_of(**engine_too: Any) -> str:
        config = run_config(tmp_path, model=model, pipeline={"gpu": "turns"}, engine=engine | engine_too)
        with pytest.raises(ConfigError) as refused:
            vllm_config.build_vllm_config(config, folder, 1)
        return str(refused.value)

    assert refusal_of().startswith(
        "pipeline.gpu: turns cannot be used here, because vLLM's engine can sleep on a GPU only"
    )
    on_gpu = SimpleNamespace(is_sleep_mode_available=lambda: True, is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr(vllm_config, "current_platform", on_gpu)
    assert refusal_of(enable_sleep_mode=False).startswith("engine.enable_sleep_mode: pipeline.gpu: turns sets it")
    assert "Sleep mode is not supported on current platform" in refusal_of(), "vLLM was asked for it"


@pytest.mark.parametrize(
    ("dtype", "given", "found"),
    [(torch.float32, None, "ieee"), (torch.float32, "tf32", "tf32"), (torch.bfloat16, None, None)],
)
def test_products_of_a_float32_engine_are_not_rounded_to_tf32_unless_a_user_decides(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, given: str | None, found: str | None
) -> None:
    from producer.engine.configuration import keep_float32

    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {"TRITON_F32_DEFAULT": given} if given else {})
        keep_float32(SimpleNamespace(model_config=SimpleNamespace(dtype=dtype)))
        assert os.environ.get("TRITON_F32_DEFAULT") == found
