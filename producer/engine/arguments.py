"""The vLLM engine arguments that follow from the rest of the file and from `--gpu`, computed without vLLM.

Guarantee: every GPU that `--gpu` names holds one part of one model, or nothing starts. For more than one model there is more
than one producer.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.model_files import weights_of
from protocol.wire.handshake import LOGPROBS_MODE

_DECODER = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
}
"""Linear layers of decoders that PEFT's `all-linear` finds and vLLM calls the same. Routers and experts it does not."""

_MERGED = {"enable_lora": False, "worker_extension_cls": "producer.engine.merging.MergingWorker"}


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
        "worker_extension_cls": "producer.engine.adapter_loading.LoadingWorker",
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
