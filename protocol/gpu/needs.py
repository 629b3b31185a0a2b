"""What a run takes of a GPU, in bytes, as arithmetic on the configuration and the shapes of the model.

Guarantee: the same numbers wherever they are computed. They are estimates: what the trainer keeps (base, adapter, optimizer) is
exact to some per cent; what a pass takes follows from the layers of a decoder with SwiGLU and RMSNorm as transformers and PEFT
compute them (what autograd keeps of small ones is 0.75 to 1 times as much), and the engine's least is a lower bound.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.config.run import RunConfig
from protocol.config.sections.learning import FIRST_TOKENS
from protocol.gpu.model_files import ModelShape, Weight, model_shape, weights_of

GIB = 2**30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEAD_TILE = 4096 * 32768  # logits that TRL's chunked LM head computes at a time, tokens times vocabulary
_MARGIN = 1.15  # of a pass: what fragmentation and kernels take beside its tensors
_KERNELS = 3 * GIB // 2  # of vLLM: CUDA graphs, sampler, the largest prefill
_PROMPT_TOKENS = 1024  # of the longest prompt, where nothing says it
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # of vLLM
_QUANTIZED_AT_LEAST = 0.5  # bytes per weight of the smallest of vLLM's formats


@dataclass(frozen=True)
class TrainerNeeds:
    """Bytes. `passes` are those that `tokens` take, `least_passes` those of the longest row alone, which is the smallest pass."""

    base: int
    adapter: int  # with gradients and optimizer
    tokens: int
    passes: int
    least_tokens: int
    least_passes: int

    @property
    def wanted(self) -> int:
        return self.base + self.adapter + self.passes

    @property
    def least(self) -> int:
        return self.base + self.adapter + self.least_passes


@dataclass(frozen=True)
class EngineNeeds:
    """Bytes. `cache` is the KV cache of one group, or of one row of the longest context if that is more."""

    weights: int
    adapters: int
    cache: int

    @property
    def least(self) -> int:
        return self.weights + self.adapters + self.cache + _KERNELS


def needs_of(config: RunConfig, folder: Path) -> tuple[TrainerNeeds, EngineNeeds]:
    """
    Args:
        folder: of the model's files.

    Raises:
        ConfigError: they do not say how large the model is.
    """
    model = model_shape(folder)
    return trainer_needs(config, model), engine_needs(config, model)


def trainer_needs(config: RunConfig, model: ModelShape) -> TrainerNeeds:
    """Of a trainer of one rank."""
    dtype_bytes, longest = _DTYPE_BYTES[config.model.dtype], longest_row(config, model)
    setting = config.pipeline.trainer_tokens_per_micro_batch
    least, wanted = (longest, max(longest, FIRST_TOKENS)) if setting == "auto" else [max(longest, setting)] * 2
    recomputes, drops = bool(config.trainer.get("gradient_checkpointing", True)), bool(config.lora.get("lora_dropout"))
    return TrainerNeeds(
        base=base_bytes(model.weights, dtype_bytes, config.model.quantization),
        adapter=_num_trained(config, model) * (8 + optimizer_bytes(str(config.trainer.get("optim", "")))),
        tokens=wanted,
        passes=pass_bytes(model, wanted, dtype_bytes, recomputes=recomputes, drops=drops),
        least_tokens=least,
        least_passes=pass_bytes(model, least, dtype_bytes, recomputes=recomputes, drops=drops),
    )


def engine_needs(config: RunConfig, model: ModelShape) -> EngineNeeds:
    """Of an engine with one GPU."""
    engine, dtype_bytes = config.engine, _DTYPE_BYTES[config.model.dtype]
    num_elements = sum(weight.num_elements for weight in model.weights)
    weights = int(num_elements * _QUANTIZED_AT_LEAST) if engine.get("quantization") else num_elements * dtype_bytes
    adapters = config.lora_slots * _num_served(config, model) * dtype_bytes if config.swap.mode == "adapter" else 0
    element = 1 if str(engine.get("kv_cache_dtype", "")).startswith("fp8") else dtype_bytes
    of_token = 2 * model.num_layers * model.kv_size * element
    tokens = max(_longest_context(config, model) or 0, config.sampling.num_generations * longest_row(config, model))
    return EngineNeeds(weights, adapters, tokens * of_token)


def longest_row(config: RunConfig, model: ModelShape) -> int:
    """Tokens of a prompt with its completion, at most."""
    prompt = config.dataset.max_prompt_tokens or _PROMPT_TOKENS
    longest = prompt + config.sampling.max_completion_length
    return min(_longest_context(config, model) or longest, longest)


def base_bytes(weights: Iterable[Weight], dtype_bytes: int, quantization: str | None) -> int:
    """Of the frozen base: with `quantization` the linear layers have the format of bitsandbytes, and the rest `dtype_bytes` per
    element. What is not floating-point in the files stays as it is."""
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
        dtype: `model.dtype`.
    """
    return base_bytes(weights_of(folder), _DTYPE_BYTES[dtype], quantization)


def adapter_parameters(weights: Iterable[Weight], rank: int, targets: str | Sequence[str]) -> int:
    """Of the LoRA matrices, (rank, in) and (out, rank) for each layer that PEFT would find: by the end of its name, by a regular
    expression that is all of it, or `all-linear`."""
    return sum(
        rank * sum(weight.shape) for weight in weights if weight.is_linear and _is_target(weight.module, targets)
    )


def optimizer_bytes(name: str) -> int:
    """State per parameter of an optimizer of transformers; those of Adam, where the name says nothing."""
    if "8bit" in name:
        return 2
    return 4 if any(kind in name for kind in ("sgd", "lion", "adafactor", "rmsprop", "adagrad")) else 8


def pass_bytes(model: ModelShape, tokens: int, dtype_bytes: int, *, recomputes: bool, drops: bool = False) -> int:
    """The most that a forward and backward pass over so many tokens takes beside the weights: what autograd keeps of the layers,
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
    """What autograd keeps of a token in one layer of h hidden and i inner values: of two norms the result (2 h) and a float32
    copy of the input (8 h bytes), the inputs that LoRA casts for seven linear layers (6 h + i), queries, keys, values and what
    attention makes of them (4 h), and three tensors inside the MLP (3 i). Dropout keeps result and mask for each of the seven.
    """
    hidden, inner = _width(model), model.intermediate_size
    kept = 8 * hidden + dtype_bytes * (12 * hidden + 4 * inner)
    return kept + (2 + dtype_bytes) * (6 * hidden + inner) if drops else kept


def _width(model: ModelShape) -> int:
    return max(model.hidden_size, model.query_size)


def _longest_context(config: RunConfig, model: ModelShape) -> int | None:
    """None: nothing says it."""
    chosen = config.engine.get("max_model_len")
    return chosen if isinstance(chosen, int) and chosen > 0 else model.max_length


def _num_trained(config: RunConfig, model: ModelShape) -> int:
    return adapter_parameters(model.weights, config.lora["r"], config.lora["target_modules"] or "all-linear")


def _num_served(config: RunConfig, model: ModelShape) -> int:
    """Parameters of one LoRA slot of vLLM: of each layer that it serves, fused ones as a whole, at the rank that it has."""
    targets = config.lora["target_modules"]
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
