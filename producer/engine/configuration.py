"""The configuration of vLLM for a run: the arguments that follow from the rest of the file and from `--gpu`, and what is refused.

Guarantee: whatever `engine:` holds, a configuration is returned or a `ConfigError` names the key and the fix. Every GPU that
`--gpu` names holds one part of one model, or nothing starts; more models take more producers. No weights are loaded.
"""

import os
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from protocol.config.library_section import build
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.model_files import weights_of
from protocol.wire.handshake import LOGPROBS_MODE
from protocol.wire.model_folder import cannot_load, resolve_model, vision_language


def check_engine_section(config: RunConfig) -> None:
    """Has vLLM validate `engine:` against the model's configuration, without loading weights. Raises ConfigError."""
    build_vllm_config(config, model_folder(config), num_gpus=num_parts(config))


def model_folder(config: RunConfig) -> Path:
    model = config.model
    return resolve_model(model.path, model.revision, trust_remote_code=model.trust_remote_code)


def build_vllm_config(config: RunConfig, folder: Path, num_gpus: int) -> Any:
    """Raises ConfigError where vLLM refuses `engine:`, or does not do with it what this pipeline needs. Limits of a batch that
    `engine:` leaves open are those of `vllm serve` on this GPU."""
    _check_adapter_dtype(config)
    _check_sleep(config)
    ours = own_arguments(config, folder, num_gpus)
    alone = ours["tensor_parallel_size"] * num_parts(config) == 1
    chosen = (ON_CPU if alone and current_platform.is_cpu() else {}) | config.engine
    if vision_language(folder) is not None:  # its tower is not loaded, and takes no memory
        chosen |= {"language_model_only": True}
        _need_torchvision()
    arguments = build("engine", AsyncEngineArgs, chosen, **ours)
    try:
        vllm_config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise cannot_load(f"{folder}/config.json", error) from error
        said = str(error).partition(" [type=")[0]  # pydantic goes on with a dump of all arguments
        raise ConfigError(f"engine: refused by vLLM: {said}") from error
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("engine.load_format: `dummy` weights are not those that the trainer trains; remove it")
    if getattr(vllm_config.speculative_config, "rejection_sample_method", None) == "synthetic":
        raise ConfigError(
            "engine.speculative_config: with rejection_sample_method=synthetic tokens are not drawn from the "
            "distribution whose log-probs are reported; use another method"
        )
    if config.swap.mode == "merged":
        _check_mergeable(vllm_config)
    return vllm_config


ON_CPU = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
"""Where vLLM's own choice computes in one more process, and the core that waits for it spins on a CPU that it needs."""


def leave_a_core(vllm_config: Any) -> None:
    """Where the engine computes in one process of its own, as vLLM does where it has several. Threads wait for each other many
    times a step; one that has to share its core holds up all."""
    if vllm_config.parallel_config.distributed_executor_backend == ON_CPU["distributed_executor_backend"]:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))


def _check_adapter_dtype(config: RunConfig) -> None:
    if config.swap.mode == "adapter" and config.model.dtype == "float32" and current_platform.is_cuda_alike():
        raise ConfigError(
            "model.dtype: float32 cannot be used on a GPU with swap.mode: adapter, because vLLM's LoRA kernels there compute in "
            "16 bits; set model.dtype: bfloat16 (or float16), or swap.mode: merged"
        )


def _need_torchvision() -> None:
    if find_spec("torchvision") is None:
        raise ConfigError(
            "model.path: vLLM imports torchvision for vision-language checkpoints, and it is not installed; install the build "
            f"that belongs to torch {version('torch')} (beside a CPU build of torch that is a CPU build, too)"
        )


def _check_sleep(config: RunConfig) -> None:
    if config.pipeline.gpu != "turns":
        return
    if not current_platform.is_sleep_mode_available():
        raise ConfigError(
            "pipeline.gpu: turns cannot be used here, because vLLM's engine can sleep on a GPU only, and on NVIDIA's best; set "
            "pipeline.gpu: own"
        )
    if "enable_sleep_mode" in config.engine:
        raise ConfigError("engine.enable_sleep_mode: pipeline.gpu: turns sets it; remove it")


def _check_mergeable(vllm_config: Any) -> None:
    on_cpu = current_platform.is_cpu()
    for cannot, reason in (
        (vllm_config.quant_config is not None, "quantized weights cannot take up an adapter without another rounding"),
        (not (on_cpu or current_platform.is_cuda_alike()), "it is known to work on CUDA, ROCm and CPU only"),
        (on_cpu and not vllm_config.model_config.enforce_eager, "on a CPU it needs engine.enforce_eager: true"),
        (vllm_config.speculative_config is not None, "it counts one token per step; remove engine.speculative_config"),
        (
            vllm_config.parallel_config.pipeline_parallel_size > 1,
            "it needs all layers in one place; remove engine.pipeline_parallel_size",
        ),
    ):
        if cannot:
            raise ConfigError(f"swap.mode: merged cannot be used here: {reason}; or set swap.mode: adapter")


_DECODER = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
}
"""Linear layers of decoders that PEFT's `all-linear` finds and vLLM calls the same. Routers and experts it does not."""

_MERGED = {"enable_lora": False, "worker_extension_cls": "producer.engine.merged_worker.MergingWorker"}


def own_arguments(config: RunConfig, folder: Path, num_gpus: int) -> dict[str, Any]:
    """For so many GPUs as `--gpu` names; 0 for the CPU. Raises ConfigError where the pipeline's parts cannot share them."""
    return {
        "model": str(folder),
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.dtype,
        "seed": config.seed,
        "tensor_parallel_size": tensor_parallel_size(config, num_gpus),
        "logprobs_mode": LOGPROBS_MODE,
        **({"enable_sleep_mode": True} if config.pipeline.gpu == "turns" else {}),
        **(_MERGED if config.swap.mode == "merged" else _loras(config, folder)),
    }


def num_parts(config: RunConfig) -> int:
    """Groups of layers, each of which has GPUs of its own."""
    return int(config.engine.get("pipeline_parallel_size", 1))


def tensor_parallel_size(config: RunConfig, num_gpus: int) -> int:
    """GPUs that each layer is spread over."""
    parts = num_parts(config)
    if num_gpus % parts:
        raise ConfigError(
            f"engine.pipeline_parallel_size: {parts} groups of layers cannot share {num_gpus} GPUs equally; name {parts} GPUs "
            f"with --gpu, or a multiple, or change engine.pipeline_parallel_size"
        )
    return max(1, num_gpus // parts)


def _loras(config: RunConfig, folder: Path) -> dict[str, Any]:
    served = served_modules(config.lora["target_modules"], folder)
    return {
        "enable_lora": True,
        "worker_extension_cls": "producer.engine.adapter_worker.LoadingWorker",
        "max_loras": config.lora_slots,
        "max_cpu_loras": config.lora_slots + 1,  # the one being loaded must not evict one that is in use
        "max_lora_rank": config.max_lora_rank,
        **({"lora_target_modules": served} if served else {}),
    }


def served_modules(targets: str | Iterable[str] | None, folder: Path) -> list[str] | None:
    """The last parts of the names of the modules that adapters have. vLLM computes adapters for these alone; without them (None)
    for every linear layer, and for embeddings and LM head of some models."""
    if targets is not None and not isinstance(targets, str):
        return sorted({_leaf(target) for target in targets})
    if targets != "all-linear":
        return None
    try:
        names = {_leaf(weight.module) for weight in weights_of(folder) if weight.is_linear}
    except ConfigError:
        return None
    return sorted(names) if names <= _DECODER else None


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
