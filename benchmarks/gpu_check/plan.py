"""Which parts there are, in the order of their worth, and which of them fit into so many minutes.

Guarantee: the choice follows from the plan and the minutes alone. Seconds are estimates from an H200, where an engine starts
in 30 s, the first one in 130 s, and six parts ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """`module` of this folder measures it, with `options` for its `run`."""

    name: str
    about: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    expected_s: int = 60
    limit_s: int = 120
    num_gpus: int = 1  # 0: it runs on a CPU, too


_PACKING = {
    "ways": {"padded": {}, "packed": {"attention": "flash_attention_2"}},
    "package": "flash-attn",
    "equal": True,
}
_NF4 = {
    "ways": {"in 16 bits": {}, "nf4": {"quantization": "nf4"}},
    "package": "bitsandbytes",
    "equal": False,
}
_CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": True}
_OFFLOAD = {
    "ways": {
        "kept": {},
        "computed again": {"trainer": _CHECKPOINTING},
        "on the host": {"trainer": _CHECKPOINTING | {"gradient_checkpointing_kwargs": {"offload": True}}},
    },
    "package": "transformers",
    "equal": True,
}
_TO_256 = {
    "max_num_seqs": 256, "max_num_batched_tokens": 8192,
    "compilation_config": {"cudagraph_capture_sizes": [1, 8, 32, 64, 128, 192, 256]},
}  # fmt: skip
"""The engine of 28 November 2026 (docs/benchmarks.md)."""
_TO_1024 = {
    "max_num_seqs": 256, "max_num_batched_tokens": 1024,
    "compilation_config": {"max_cudagraph_capture_size": 1024},
}  # fmt: skip
_SPECIALIZED = _TO_1024 | {"specialize_active_lora": True}


def _arm(name: str, about: str, mode: str, engine: dict[str, Any], *groups: int, **more: bool) -> Part:
    options = {"mode": mode, "engine": engine, "groups": groups} | more
    return Part(f"engine-{name}", about, "engine_arm", options, 45, 200, 0)


ARMS = (
    _arm("a", "adapters, graphs of up to 256 tokens, 33 groups", "adapter", _TO_256, 33, own_metadata=False),
    _arm("e", "merged, every step in a graph, 64 groups", "merged", _TO_1024, 64),
    _arm("defaults", "adapters, our defaults and admission", "adapter", {}, 0),
    _arm("defaults-merged", "the same, merged", "merged", {}, 0),
    _arm("d-c", "adapters, every step in a graph, 64 and 33 groups", "adapter", _TO_1024, 64, 33, own_metadata=False),
    _arm("b", "a, merged", "merged", _TO_256, 33),
    _arm("g", "d with our LoRA metadata", "adapter", _TO_1024, 64),
    _arm("f", "d with specialize_active_lora", "adapter", _SPECIALIZED, 64, own_metadata=False),
    _arm("h", "e beside a busy trainer", "merged", _TO_1024, 64, beside=True),
    _arm("h-mps", "the same under MPS", "merged", _TO_1024, 64, beside=True, mps=True),
)
"""The arms of the part `engine`, the most wanted first."""
PLAN = (
    Part("machine", "GPU, memory, versions, what does not import", "machine", {}, 15, 60, 0),
    Part("demo", "the demo, both daemons on one GPU, merged, float32", "demo", {}, 150, 300),
    Part("engine", "the engine alone, in the arms engine-a to engine-h-mps", "engine", {"seconds": 350}, 360, 380, 0),
    Part("beside-trl", "SmolLM2 learns sums: the pair, merged, and TRL's asynchronous trainer", "beside_trl", {}, 360, 480, 0),
    Part("pair-adapter", "0.6 B model, both daemons on one GPU, adapters", "pair", {"mode": "adapter"}, 220, 360, 0),
    Part("parity-adapter", "log-probs of vLLM and trainer, adapters", "parity", {"mode": "adapter"}, 130, 300, 0),
    Part("parity-float32", "the same in float32, and the tolerance", "parity", {"mode": "merged", "dtype": "float32"}, 110, 300),
    Part("step", "a training step beside TRL's, SDPA", "step", {}, 90, 200, 0),
    Part("pair-turns", "the same in turns, each with most of the GPU", "turns", {}, 200, 360, 0),
    Part("pair-merged", "0.6 B model, both daemons on one GPU, merged", "pair", {"mode": "merged"}, 200, 360, 0),
    Part("parity-merged", "log-probs of vLLM and trainer, merged", "parity", {"mode": "merged"}, 130, 300, 0),
    Part("step-flash", "a training step beside TRL's, FlashAttention", "step", {"attention": "flash_attention_2"}, 70, 200),
    Part("packing", "packed rows (FlashAttention) beside padded rows (SDPA)", "variants", _PACKING, 60, 150),
    Part("nf4", "our training step on a base of 4 bits beside one of 16", "variants", _NF4, 60, 150),
    Part("swap-adapter", "swaps of 40 and 160 MB, adapters", "swaps", {"mode": "adapter"}, 240, 360, 0),
    Part("decode", "tokens/s without a policy, adapter, merged", "decode", {}, 350, 500, 0),
    Part("swap-merged", "swaps of 40 and 160 MB, merged", "swaps", {"mode": "merged"}, 120, 240, 0),
    Part("ranks", "0.6 B model, trainer on two GPUs", "pair", {"mode": "adapter", "ranks": 2}, 220, 360, 2),
    Part("activations", "our training step with activations kept, computed again, on the host", "variants", _OFFLOAD, 60, 150),
)  # fmt: skip


def planned(minutes: float) -> list[Part]:
    """The first parts that together are expected to take no longer; at least one."""
    parts, left_s = [PLAN[0]], 60 * minutes - PLAN[0].expected_s
    for part in PLAN[1:]:
        left_s -= part.expected_s
        if left_s < 0:
            break
        parts.append(part)
    return parts


def obstacle(part: Part, gpus: Sequence[int]) -> str:
    """Why these GPUs are not enough; "" if they are."""
    if len(gpus) >= part.num_gpus:
        return ""
    return (
        "it needs an NVIDIA GPU" if part.num_gpus == 1 else f"it needs {part.num_gpus} GPUs, name them with --gpu 0,1"
    )
