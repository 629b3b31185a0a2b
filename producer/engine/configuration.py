"""The configuration of vLLM for a run, and the settings that this pipeline cannot use.

Guarantee: for any content of `engine:`, it returns a configuration or raises a `ConfigError` that names the key and the fix. It
loads no weights.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from producer.engine import graphs
from producer.engine.own_arguments import num_parts, own_arguments
from producer.engine_contract import most_groups
from protocol.config.library_section import build
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.weights import weights_of
from protocol.wire.model_folder import needs_own_code, vision_language
from protocol.wire.model_source import resolve_model


def model_folder(config: RunConfig) -> Path:
    model = config.model
    return resolve_model(model.path, model.revision, trust_remote_code=model.trust_remote_code)


def build_vllm_config(config: RunConfig, folder: Path, num_gpus: int) -> Any:
    """Build vLLM's configuration. Limits of a batch that `engine:` leaves open are those of `vllm serve` on this GPU, but
    for what `producer.engine.graphs` says. Raise ConfigError if vLLM refuses `engine:`, or if this pipeline cannot use the
    result."""
    _check_adapter_dtype(config)
    _check_sleep(config)
    ours = own_arguments(config, folder, num_gpus)
    alone = ours["tensor_parallel_size"] * num_parts(config) == 1
    chosen = (ON_CPU if alone and current_platform.is_cpu() else {}) | config.engine
    if vision_language(folder) is not None:  # its tower is not loaded, and takes no memory
        chosen |= {"language_model_only": True}
        _need_torchvision()
    arguments = build("engine", AsyncEngineArgs, chosen, **ours)
    vllm_config = _created(arguments, folder)
    if vllm_config.compilation_config.cudagraph_mode.name != "NONE":
        chosen = _graph_defaults(config, folder, arguments, vllm_config) | chosen
        vllm_config = _created(build("engine", AsyncEngineArgs, chosen, **ours), folder)
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("engine.load_format: `dummy` weights are not the weights that the trainer trains; remove it")
    if getattr(vllm_config.speculative_config, "rejection_sample_method", None) == "synthetic":
        raise ConfigError(
            "engine.speculative_config: with rejection_sample_method=synthetic tokens are not drawn from the "
            "distribution whose log-probs are reported; use another method"
        )
    if config.weights != "adapter":
        _check_exchange(config, vllm_config)
    return vllm_config


def _created(arguments: Any, folder: Path) -> Any:
    try:
        return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise needs_own_code(f"{folder}/config.json") from error
        reason = str(error).partition(" [type=")[0]  # pydantic appends a dump of all arguments
        raise ConfigError(f"engine: refused by vLLM: {reason}") from error


def _graph_defaults(config: RunConfig, folder: Path, arguments: Any, vllm_config: Any) -> dict[str, Any]:
    """Return what `producer.engine.graphs` adds to the arguments of which vLLM has made this configuration."""
    scheduler = vllm_config.scheduler_config
    places = num_places(scheduler.max_num_seqs, config.sampling.num_generations)
    is_small = 0 < sum(weight.num_elements for weight in weights_of(folder)) < graphs.LAUNCH_BOUND
    defaults: dict[str, Any] = {"cudagraph_metrics": True}
    if vllm_config.speculative_config is not None:
        return defaults
    tokens, largest = scheduler.max_num_batched_tokens, places
    if is_small:
        largest = graphs.tokens_of_step(tokens, places)
        is_open = config.engine.keys().isdisjoint(("max_num_batched_tokens", "performance_mode"))
        if is_open and scheduler.enable_chunked_prefill:
            tokens = defaults["max_num_batched_tokens"] = largest
    chosen = [
        sizes
        for of in (arguments, arguments.compilation_config)
        for sizes in (of.cudagraph_capture_sizes, of.max_cudagraph_capture_size)
        if sizes is not None
    ]
    if not chosen:
        of_vllm = vllm_config.compilation_config.cudagraph_capture_sizes
        defaults["cudagraph_capture_sizes"] = graphs.capture_sizes(of_vllm, min(largest, tokens), places)
    return defaults


ON_CPU: dict[str, Any] = {
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "block_size": 32,
}
"""By default vLLM computes in one more process, and the engine core spins on a CPU that this process needs. And its prefix cache
keeps blocks of 128 tokens, so each completion of a group computes a shorter prompt anew."""


def leave_a_core(vllm_config: Any) -> None:
    """Leave one core to the producer if the engine computes in one process, as vLLM does with several processes. Threads wait for
    each other many times a step, so a thread that shares its core holds up all of them."""
    if vllm_config.parallel_config.distributed_executor_backend == ON_CPU["distributed_executor_backend"]:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))


def keep_float32(vllm_config: Any) -> None:
    """Let Triton multiply in float32 for a model in float32. By default attention on CUDA rounds to TF32, and differs from the
    trainer's by more than `swap.probe_tolerance`."""
    if vllm_config.model_config.dtype == torch.float32:
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def take_places(vllm_config: Any, group_size: int) -> int:
    """Return vLLM's limit of sequences in a batch, and raise it. The new limit has room for all groups that the producer sends at
    once, and for a probe, which would otherwise wait until a completion ends."""
    scheduler = vllm_config.scheduler_config
    asked = int(scheduler.max_num_seqs)
    scheduler.max_num_seqs = num_places(asked, group_size)
    return asked


def num_places(max_num_seqs: int, group_size: int) -> int:
    return most_groups(max_num_seqs, group_size) * group_size + 1


def _check_adapter_dtype(config: RunConfig) -> None:
    if config.weights == "adapter" and config.model.dtype == "float32" and current_platform.is_cuda_alike():
        raise ConfigError(
            "model.dtype: float32 cannot be used on a GPU with swap.mode: adapter, because vLLM's LoRA kernels there compute in "
            "16 bits; set model.dtype: bfloat16 (or float16), or swap.mode: merged"
        )


def _need_torchvision() -> None:
    if find_spec("torchvision") is None:
        raise ConfigError(
            "model.path: vLLM imports torchvision for vision-language checkpoints, and it is not installed; install the build "
            f"for torch {version('torch')}, which is a CPU build if that torch is one"
        )


def _check_sleep(config: RunConfig) -> None:
    if config.pipeline.gpu != "turns":
        return
    if not current_platform.is_sleep_mode_available():
        raise ConfigError(
            "pipeline.gpu: turns cannot be used here, because vLLM's engine can sleep on a GPU only; set pipeline.gpu: own"
        )
    if "enable_sleep_mode" in config.engine:
        raise ConfigError("engine.enable_sleep_mode: pipeline.gpu: turns sets it; remove it")


def _check_exchange(config: RunConfig, vllm_config: Any) -> None:
    """Refuse an engine whose own weights cannot be replaced, merged or patched."""
    full = config.weights == "full"
    key = config.patched_by or "swap.mode: merged"
    fix = "train an adapter that vLLM serves" if full else "set swap.mode: adapter"
    on_cpu, model = current_platform.is_cpu(), vllm_config.model_config
    what = "a patch cannot be applied to" if full else "an adapter cannot be merged into"
    for cannot, reason in (
        (vllm_config.quant_config is not None, f"{what} quantized weights without another rounding;"),
        (not (on_cpu or current_platform.is_cuda_alike()), "it is known to work on CUDA, ROCm and CPU only;"),
        (on_cpu and not model.enforce_eager, "on a CPU it needs engine.enforce_eager: true, or"),
        (
            vllm_config.speculative_config is not None,
            "it counts one token per step; remove engine.speculative_config, or",
        ),
        (
            vllm_config.parallel_config.pipeline_parallel_size > 1,
            "it needs all layers in one place; remove engine.pipeline_parallel_size, or",
        ),
        (full and model.is_moe, "vLLM lays the weights of experts out anew;"),
        (full and model.use_mla, "vLLM computes weights of its own for latent attention (MLA);"),
    ):
        if cannot:
            raise ConfigError(f"{key} cannot be used here: {reason} {fix}")
