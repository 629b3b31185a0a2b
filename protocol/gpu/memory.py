"""The memory that a run takes of a GPU, in bytes, and how trainer and producer divide one GPU (`pipeline.gpu: shared`).

Guarantee: the same numbers wherever they are computed, without torch. They are estimates: what the trainer keeps (base, adapter,
optimizer) is exact to some per cent. A pass follows from the layers of a decoder with SwiGLU and RMSNorm as transformers and PEFT
compute them. Weights and KV cache of the engine are lower bounds. Both shares, two CUDA contexts and a rest fit into the GPU
together, or a `ConfigError` says what to change. A share that the user sets (`engine.gpu_memory_utilization`) is kept, and the
trainer gets the rest.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from protocol.config.learning import FIRST_TOKENS
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError
from protocol.gpu.cache_layers import numbers_of_row
from protocol.gpu.model_files import ModelShape, model_shape
from protocol.gpu.nvml import Gpu, given_gpu, gpu_facts
from protocol.gpu.weights import Weight, weights_of
from protocol.wire.model_source import folder_on_disk

GIB = 2**30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEAD_TILE = 4096 * 32768  # logits that TRL's chunked LM head computes at a time, tokens times vocabulary
_MARGIN = 1.15  # of a pass: what fragmentation and kernels take beside its tensors
_KERNELS = 3 * GIB // 2  # of vLLM: CUDA graphs, sampler, the largest prefill
_PROMPT_TOKENS = 1024  # of the longest prompt, where nothing says it
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # of vLLM
_LINEAR = re.compile(r"\.(?:[qkvo]|qkv|gate|up|down|gate_up)_proj$")  # that is one whatever the model
_NUMBERS = {"adafactor": 0, "sgd": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "ademamix": 3, "grokadamw": 3}
"""The numbers that kinds of optimizers keep of a parameter. Those of Adafactor are of rows and columns."""
_CACHE_AT_LEAST = 0.375  # bytes per number of the smallest of vLLM's formats of a KV cache
_QUANTIZED_AT_LEAST = 0.5  # bytes per weight of the smallest of vLLM's formats


@dataclass(frozen=True)
class TrainerNeeds:
    """The bytes that a trainer takes. `passes` belongs to a pass of `tokens`, `least_passes` to the longest row alone."""

    base: int
    trained: int  # the adapter, or the weights that train, with gradients and optimizer
    tokens: int
    passes: int
    least_tokens: int
    least_passes: int

    @property
    def wanted(self) -> int:
        return self.base + self.trained + self.passes

    @property
    def least(self) -> int:
        return self.base + self.trained + self.least_passes


@dataclass(frozen=True)
class EngineNeeds:
    """The bytes that an engine takes. `cache` is the KV cache of one group, or of one row of the longest context if that is
    more."""

    weights: int
    adapters: int
    cache: int

    @property
    def least(self) -> int:
        return self.weights + self.adapters + self.cache + _KERNELS


def needs_of(config: RunConfig, folder: Path) -> tuple[TrainerNeeds, EngineNeeds]:
    """Compute the needs of trainer and engine.

    Args:
        folder: of the model's files.

    Raises:
        ConfigError: they do not say how large the model is.
    """
    model = model_shape(folder)
    return trainer_needs(config, model), engine_needs(config, model)


def trainer_needs(config: RunConfig, model: ModelShape, num_ranks: int = 1) -> TrainerNeeds:
    """Compute the needs of a trainer of one rank, or of one of several. Those that do not share the weights that train add up
    their gradients in one tensor, after the passes."""
    num_parts = num_ranks if config.spreads_weights else 1
    full, longest = config.lora is None, longest_row(config, model)
    dtype_bytes = _DTYPE_BYTES[config.trainer_dtype]
    setting = config.pipeline.trainer_tokens_per_micro_batch
    least, wanted = (longest, max(longest, FIRST_TOKENS)) if setting == "auto" else [max(longest, setting)] * 2
    recomputes = bool(config.trainer.get("gradient_checkpointing", True))
    drops = bool(config.lora_section.get("lora_dropout"))
    trained = _num_trained(config, model)
    optimizer = str(config.trainer.get("optim", ""))
    state = optimizer_bytes(optimizer, config.trainer.get("optim_args"))
    each = 8 + state
    more = 3 * state * _num_embedded(config, model) if full and "8bit" in optimizer else 0  # in float32 all the same
    if full and float(config.trainer.get("beta") or 0.0) != 0.0:
        more += _reference_bytes(config, model, casts=num_parts == 1)
    casts = trained * _DTYPE_BYTES["bfloat16"] if full else 0  # autocast keeps them during a pass
    if num_parts > 1:
        casts = _gathered_bytes(model)
    added = 4 * trained if num_ranks > num_parts else 0
    base = base_bytes(model.weights, dtype_bytes, config.model.quantization) - (4 * trained if full else 0)
    return TrainerNeeds(
        base=base // num_parts,
        trained=(trained * each + more) // num_parts,
        tokens=wanted,
        passes=max(added, casts + pass_bytes(model, wanted, dtype_bytes, recomputes=recomputes, drops=drops)),
        least_tokens=least,
        least_passes=max(added, casts + pass_bytes(model, least, dtype_bytes, recomputes=recomputes, drops=drops)),
    )


def _reference_bytes(config: RunConfig, model: ModelShape, *, casts: bool) -> int:
    """Return the bytes of the weights of before, at most: linear layers are kept as autocast rounds them, the rest, and a head
    that computes in float32, as it trains."""
    trainer = config.trainer
    casts &= config.model.dtype == "bfloat16" and bool(trainer.get("bf16", True)) and not trainer.get("fp16")
    total = 0
    for weight in _own_trained(config, model):
        is_head = weight.module.endswith("lm_head") and not trainer.get("cast_lm_head_to_fp32")
        is_rounded = casts and (is_head or (_LINEAR.search(weight.module) and "expert" not in weight.name))
        total += weight.num_elements * (2 if is_rounded and weight.name.endswith(".weight") else 4)
    return total


def _gathered_bytes(model: ModelShape) -> int:
    """Return the bytes of weights that are whole during a pass of ranks that share them: in float32 those around the layers, with
    their gradient and its copy on the way, and in 16 bits two layers and the gradient of one, which travels in float32."""
    of_layers = sum(weight.num_elements for weight in model.weights if weight.is_of_layer)
    around = sum(weight.num_elements for weight in model.weights) - of_layers
    return 3 * 4 * around + (2 * 2 + 2 + 4) * of_layers // model.num_layers


def engine_needs(config: RunConfig, model: ModelShape) -> EngineNeeds:
    """Compute the needs of an engine with one GPU."""
    engine, dtype_bytes = config.engine, _DTYPE_BYTES[config.model.dtype]
    loaded = [weight for weight in model.weights if weight.layer < model.num_layers]  # no layers for speculation
    weights = base_bytes(loaded, dtype_bytes, None)
    if engine.get("quantization"):
        weights = min(weights, int(sum(weight.num_elements for weight in loaded) * _QUANTIZED_AT_LEAST))
    adapters = config.lora_slots * _num_served(config, model) * dtype_bytes if config.weights == "adapter" else 0
    of_group = config.sampling.num_generations * row_bytes(config, model, longest_row(config, model))
    return EngineNeeds(weights, adapters, max(of_group, row_bytes(config, model, longest_context(config, model) or 0)))


def row_bytes(config: RunConfig, model: ModelShape, length: int) -> int:
    """Compute the bytes of a row of this length in the KV cache, at least: without blocks, scales and what is in flight."""
    kind = str(config.engine.get("kv_cache_dtype") or "auto")
    kind = config.model.dtype if kind == "auto" else kind
    of_number = _DTYPE_BYTES.get(kind, 1 if kind.startswith(("fp8", "int8")) else _CACHE_AT_LEAST)
    return int(numbers_of_row(model.cache_layers, length) * of_number)


def longest_row(config: RunConfig, model: ModelShape) -> int:
    """Tokens of a prompt with its completion, at most."""
    prompt = config.dataset.max_prompt_tokens or _PROMPT_TOKENS
    longest = prompt + config.sampling.max_completion_length
    return min(longest_context(config, model) or longest, longest)


def base_bytes(weights: Iterable[Weight], dtype_bytes: int, quantization: str | None) -> int:
    """Compute the bytes of the frozen base: with `quantization` the linear layers have the format of bitsandbytes, and the
    rest `dtype_bytes` per element. What is not floating-point in the files stays as it is."""
    total = 0.0
    for weight in weights:
        if not weight.is_float:
            total += weight.num_elements * weight.bits / 8
        elif quantization == "nf4" and weight.is_linear:
            total += weight.num_elements * (0.5 + 4 / 64)  # a float32 for every block of 64
        elif quantization == "int8" and weight.is_linear:
            total += weight.num_elements + 4 * weight.shape[0]  # a float32 for every row
        else:
            total += weight.num_elements * dtype_bytes
    return int(total)


def base_of(folder: Path, dtype: str, quantization: str | None) -> int:
    """Compute the bytes of the base in this folder; 0 where its files do not say the shapes of its weights.

    Args:
        dtype: in which it is loaded.
    """
    return base_bytes(weights_of(folder), _DTYPE_BYTES[dtype], quantization)


def adapter_parameters(weights: Iterable[Weight], rank: int, targets: str | Sequence[str]) -> int:
    """Count the parameters of the LoRA matrices, (rank, in) and (out, rank) for each layer that PEFT would find: by the end of
    its name, by a regular expression that is all of it, or `all-linear`."""
    return sum(
        rank * sum(weight.shape) for weight in weights if weight.is_linear and _is_target(weight.module, targets)
    )


def optimizer_bytes(name: str, arguments: Any = None) -> int:
    """State per parameter of an optimizer of transformers with these `optim_args`; that of Adam, where the name says nothing. 0
    where there is next to none, or where bitsandbytes moves it to the host once the device is full."""
    if name.startswith("paged_"):
        return 0
    numbers = next((count for kind, count in _NUMBERS.items() if kind in name), 2)
    return (numbers + ("momentum" in str(arguments))) * (1 if "8bit" in name else 4)


def pass_bytes(model: ModelShape, tokens: int, dtype_bytes: int, *, recomputes: bool, drops: bool = False) -> int:
    """The most that a forward and backward pass over `tokens` tokens takes beside the weights: what autograd keeps of the layers,
    hidden states before and after the last norm with a gradient in float32, and two tiles of logits.

    Args:
        recomputes: gradient checkpointing keeps the input of each layer, and all of one.
        drops: there is LoRA dropout.
    """
    hidden, layer = _width(model), layer_bytes(model, dtype_bytes, drops=drops)
    layers = model.num_layers * dtype_bytes * hidden + layer if recomputes else model.num_layers * layer
    head = (4 + 2 * dtype_bytes) * hidden
    tile = 2 * dtype_bytes * min(_HEAD_TILE, tokens * model.vocab_size)
    return round(_MARGIN * (tokens * (layers + head) + tile))


def layer_bytes(model: ModelShape, dtype_bytes: int, *, drops: bool) -> int:
    """Compute the bytes that autograd keeps of a token in one layer of h hidden and i inner values: of two norms the result (2 h)
    and a float32 copy of the input (8 h bytes), queries, keys, values and what attention makes of them (4 h), and four tensors
    inside the MLP (4 i). Dropout keeps result and mask for the inputs of the seven linear layers (6 h + i).
    """
    hidden, inner = _width(model), model.intermediate_size
    kept = 8 * hidden + dtype_bytes * (6 * hidden + 4 * inner)
    return kept + (2 + dtype_bytes) * (6 * hidden + inner) if drops else kept


def _width(model: ModelShape) -> int:
    return max(model.hidden_size, model.query_size)


def longest_context(config: RunConfig, model: ModelShape) -> int | None:
    """Return the longest context, or None if no setting or file gives it."""
    chosen = config.engine.get("max_model_len")
    return chosen if isinstance(chosen, int) and chosen > 0 else model.max_length


def _num_trained(config: RunConfig, model: ModelShape) -> int:
    if config.lora is None:
        return sum(weight.num_elements for weight in _own_trained(config, model))
    section, total = config.lora, 0
    ranks, targets = section.get("rank_pattern") or {}, section["target_modules"] or "all-linear"
    for weight in model.weights:
        if weight.module.endswith(tuple(section.get("modules_to_save") or ())):
            total += weight.num_elements
        elif weight.is_linear and _is_target(weight.module, targets):
            own = (rank for name, rank in ranks.items() if re.fullmatch(rf"(.*\.)?({name})", weight.module))
            total += adapter_parameters([weight], next(own, section["r"]), "all-linear")
            total += weight.shape[0] if section.get("use_dora") else 0
    return total


def _num_embedded(config: RunConfig, model: ModelShape) -> int:
    """Count the parameters of embeddings, whose state transformers has bitsandbytes keep in float32."""
    return sum(weight.num_elements for weight in _own_trained(config, model) if "embed" in weight.name)


def _own_trained(config: RunConfig, model: ModelShape) -> list[Weight]:
    patterns = config.trainable or ["*"]
    return [weight for weight in model.weights if any(fnmatchcase(weight.name, pattern) for pattern in patterns)]


def _num_served(config: RunConfig, model: ModelShape) -> int:
    """Parameters of one LoRA slot of vLLM: of each layer that it serves, fused ones as a whole, at the rank that it has."""
    targets = config.lora_section["target_modules"]
    if targets is None or isinstance(targets, str):
        return adapter_parameters(model.weights, config.max_lora_rank, "all-linear")
    leaves = {target.rpartition(".")[2] for target in targets}
    served = leaves.union(*(fused for fused in _FUSED if leaves & fused))
    return adapter_parameters(model.weights, config.max_lora_rank, sorted(served))


def _is_target(module: str, targets: Any) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


CONTEXT = 3 * GIB // 4  # of a process, before its first tensor: CUDA itself and its kernels
MOST = 0.9  # of the GPU: what an engine takes that has it for itself
_UNCOUNTED = 0.03  # of the GPU: what the driver keeps, and what NVML counts and CUDA does not
_KEY = "engine.gpu_memory_utilization"
_SMALLER = (
    "model.quantization: nf4, engine.quantization, a shorter engine.max_model_len or sampling.max_completion_length, "
    "pipeline.gpu: turns, in which only one of them has to fit, or a GPU each (pipeline.gpu: own)"
)


@dataclass(frozen=True)
class Shares:
    """The shares of the memory of one GPU, in bytes. Each daemon takes a CUDA context beside its share."""

    total: int
    trainer: int
    utilization: float  # of `total`: vLLM's gpu_memory_utilization
    is_chosen: bool  # by the user
    needs: TrainerNeeds
    engine: EngineNeeds

    @property
    def producer(self) -> int:
        return int(self.utilization * self.total)

    def in_words(self) -> str:
        needs, why = self.needs, f"as {_KEY} says" if self.is_chosen else f"{_KEY}, computed"
        smaller = " and will be cut smaller" if needs.wanted > self.trainer else ""
        return (
            f"of {gib(self.total)} the trainer may take {gib(self.trainer)} ({_kept(needs)}; a pass of {needs.tokens} tokens "
            f"takes {gib(needs.passes)}{smaller}) and the producer {gib(self.producer)} ({self.utilization:g}, {why})"
        )


def room_of(total: int, processes: int) -> int:
    """Compute the bytes that CUDA leaves to this number of processes."""
    return int(total * (1 - _UNCOUNTED)) - processes * CONTEXT


def shares_of(config: RunConfig, total: int, needs: TrainerNeeds, engine: EngineNeeds) -> Shares:
    """Divide the memory of a GPU.

    Args:
        total: bytes of the GPU.

    Raises:
        ConfigError: the two do not fit.
    """
    room, chosen = room_of(total, 2), chosen_utilization(config)
    if chosen is not None:
        return _around(chosen, total, room, needs, engine)
    if needs.least + engine.least > room:
        raise ConfigError(
            f"pipeline.gpu: shared: the GPU has {gib(total)}. CUDA leaves {gib(max(0, room))}, and both need "
            f"{gib(needs.least + engine.least)} at least: {_least(needs)}; the engine {gib(engine.least)} (weights "
            f"{gib(engine.weights)}, LoRA slots {gib(engine.adapters)}, KV cache of one group {gib(engine.cache)}). Take "
            f"{_SMALLER}"
        )
    producer = max(engine.least, min(int(MOST * total), room - needs.wanted))
    utilization = math.floor(1000 * producer / total) / 1000
    return Shares(total, room - int(utilization * total), utilization, False, needs, engine)


def _around(utilization: float, total: int, room: int, needs: TrainerNeeds, engine: EngineNeeds) -> Shares:
    trainer = room - int(utilization * total)
    if trainer < needs.least:
        highest = math.floor(100 * (room - needs.least) / total) / 100
        fix = f"lower it to at most {highest:g}, or leave it out" if highest > 0 else f"take {_SMALLER}"
        raise ConfigError(
            f"{_KEY}: {utilization:g} of {gib(total)} leaves {gib(max(0, trainer))} to the trainer, which shares the GPU "
            f"(pipeline.gpu: shared), and that is too little: {_least(needs)}; {fix}"
        )
    return Shares(total, trainer, utilization, True, needs, engine)


def chosen_utilization(config: RunConfig) -> float | None:
    """Parse the engine's share that YAML or `--set` gives."""
    value = config.engine.get("gpu_memory_utilization")
    if value is None:
        return None
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise ConfigError(f"{_KEY}: expected a share above 0 and at most 1, got {value!r}")
    return found


def _least(needs: TrainerNeeds) -> str:
    return (
        f"the trainer needs {gib(needs.least)} ({_kept(needs)}, a pass of {needs.least_tokens} tokens "
        f"{gib(needs.least_passes)})"
    )


def _kept(needs: TrainerNeeds) -> str:
    return f"base {gib(needs.base)}, what trains, with its optimizer, {gib(needs.trained)}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def preview(config: RunConfig, choice: str) -> Iterator[str]:
    """Lines for the user; none where nothing is shared.

    Args:
        choice: what `--gpu` says.

    Raises:
        ConfigError: trainer and producer do not fit.
    """
    if config.pipeline.gpu != "shared" or choice == "cpu":
        return
    folder = folder_on_disk(config.model.path, config.model.revision)
    if not (folder / "config.json").is_file():
        yield "shares of the GPU: computed at the start, from the files of model.path, which are not on this machine"
        return
    needs, engine = needs_of(config, folder)
    gpu = known_gpu(choice)
    if gpu is not None:
        yield f"shares of GPU {gpu.index}: {shares_of(config, gpu.total_bytes, needs, engine).in_words()}"
    else:
        yield (
            f"shares of the GPU: the trainer wants {gib(needs.wanted)} and needs {gib(needs.least)} at least, the engine "
            f"{gib(engine.least)}; there is no such GPU here to divide"
        )


def known_gpu(choice: str) -> Gpu | None:
    """Return what is known of the GPU that `--gpu` names; None if there is none, or there are several."""
    try:
        return gpu_facts(given_gpu(int(choice)).index) if choice.isdecimal() else None
    except DeviceError:
        return None
