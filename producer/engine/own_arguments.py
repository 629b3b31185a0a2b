"""The vLLM engine arguments that follow from the rest of the file and from `--gpu`, computed without vLLM.

Guarantee: every GPU that `--gpu` names holds one part of one model, or the engine does not start. Each further copy of the model
takes another producer.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.weights import weights_of
from protocol.wire.handshake import LOGPROBS_MODE

_DECODER = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
}
"""Linear layers of decoders that PEFT's `all-linear` finds, and that have the same names in vLLM. Routers and experts have other
names there."""

_WORKERS = {
    "merged": "producer.engine.merged_worker.MergeWorker",
    "full": "producer.engine.patch_worker.PatchWorker",
}
"""Extensions of vLLM's workers that exchange the engine's own weights."""


def own_arguments(config: RunConfig, folder: Path, num_gpus: int) -> dict[str, Any]:
    """Return the arguments for `num_gpus` GPUs (0: the CPU). Raise ConfigError if groups of layers cannot share them equally."""
    return {
        "model": str(folder),
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.dtype,
        "seed": config.seed,
        "tensor_parallel_size": tensor_parallel_size(config, num_gpus),
        "logprobs_mode": LOGPROBS_MODE,
        "scheduling_policy": "priority",
        **({"enable_sleep_mode": True} if config.pipeline.gpu == "turns" else {}),
        **(_loras(config, folder) if config.weights == "adapter" else _exchange(config)),
    }


def num_parts(config: RunConfig) -> int:
    """Return the number of groups of layers. Each group has its own GPUs."""
    return int(config.engine.get("pipeline_parallel_size", 1))


def tensor_parallel_size(config: RunConfig, num_gpus: int) -> int:
    """Return the number of GPUs over which each layer is spread."""
    parts = num_parts(config)
    if num_gpus % parts:
        raise ConfigError(
            f"engine.pipeline_parallel_size: {parts} groups of layers cannot share {num_gpus} GPUs equally; name {parts} GPUs "
            f"with --gpu, or a multiple, or change engine.pipeline_parallel_size"
        )
    return max(1, num_gpus // parts)


def _exchange(config: RunConfig) -> dict[str, Any]:
    return {"enable_lora": False, "worker_extension_cls": _WORKERS[config.weights]}


def _loras(config: RunConfig, folder: Path) -> dict[str, Any]:
    served = served_modules(config.lora_section["target_modules"], folder)
    return {
        "enable_lora": True,
        "worker_extension_cls": "producer.engine.adapter_worker.AdapterWorker",
        "max_loras": config.lora_slots,
        "max_cpu_loras": config.lora_slots + 1,  # the one being loaded must not evict one that is in use
        "max_lora_rank": config.max_lora_rank,
        **({"lora_target_modules": served} if served else {}),
    }


def served_modules(targets: str | Iterable[str] | None, folder: Path) -> list[str] | None:
    """Return the last parts of the names of the modules that adapters have. vLLM then computes adapters for these modules alone.
    None stands for every linear layer, and for embeddings and LM head of some models."""
    if targets is not None and not isinstance(targets, str):
        return sorted({target.rpartition(".")[2] for target in targets})
    if targets != "all-linear":
        return None
    try:
        names = {weight.module.rpartition(".")[2] for weight in weights_of(folder) if weight.is_linear}
    except ConfigError:
        return None
    return sorted(names) if names <= _DECODER else None
