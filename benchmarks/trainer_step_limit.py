"""The limit of a training step, and what else it does.

Guarantee: the limit is measured, not computed: the products of the step with the weights of layers, adapters and LM head, in
their shapes and type, into memory that is there already. A step that took no longer would do nothing else.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch.profiler import ProfilerActivity, profile

_TILE = 512  # tokens that go through the LM head at once

_KINDS = {
    "attention": ("scaled_dot_product", "attention", "bmm", "softmax"),
    "elementwise": ("mul", "add", "sub", "div", "neg", "silu", "exp", "rsqrt", "pow", "sum", "mean", "where", "einsum"),
    "moving data": ("index", "copy", "cat", "gather", "scatter", "embedding", "fill", "zero", "clone", "contiguous"),
}
"""Parts of the names of torch's operations."""


def products(model: Any, passes: list[int], num_trained: int, *, again: bool) -> None:
    """Make every product with weights of a step whose passes have so many positions.

    Args:
        num_trained: tokens that go through the LM head.
        again: layers are passed through twice, for gradient checkpointing.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def room(what: str, rows: int, columns: int) -> torch.Tensor:
        return kept.setdefault((what, rows, columns), torch.ones(rows, columns, dtype=model.dtype))

    for positions in passes:
        for layer in layers:
            weight, a, b = (
                each.weight.detach() for each in (layer.get_base_layer(), layer.lora_A.default, layer.lora_B.default)
            )
            x, y = room("x", positions, weight.size(1)), room("y", positions, weight.size(0))
            narrow, back = room("narrow", positions, len(a)), room("back", positions, len(a))
            for _ in range(2 if again else 1):
                torch.mm(x, a.T, out=narrow)
                torch.mm(x, weight.T, out=y).addmm_(narrow, b.T, alpha=0.0)
            torch.mm(y, b, out=back)
            torch.mm(y, weight, out=room("dx", *x.shape)).addmm_(back, a, alpha=0.0)
            torch.mm(back.T, x, out=room("da", *a.shape))
            torch.mm(y.T, narrow, out=room("db", *b.shape))
    weight = model.get_output_embeddings().weight.detach()
    for start in range(0, num_trained, _TILE):
        rows = min(_TILE, num_trained - start)
        logits = torch.mm(room("hidden", rows, weight.size(1)), weight.T, out=room("logits", rows, len(weight)))
        torch.mm(logits, weight, out=room("slopes", rows, weight.size(1)))


def shares(step: Callable[[], Any], model: Any) -> dict[str, float]:
    """The share of each kind of operation in the time of a step, largest first."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    rank = next(module.r["default"] for module in model.modules() if isinstance(module, LoraLayer))
    vocabulary = model.get_output_embeddings().weight.size(0)
    times: Counter[str] = Counter()
    for event in found.key_averages(group_by_input_shape=True):
        times[_kind(event.key, event.input_shapes, rank, vocabulary)] += event.self_cpu_time_total
    return {kind: time / times.total() for kind, time in times.most_common()}


def _kind(name: str, shapes: list[list[int]], rank: int, vocabulary: int) -> str:
    if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
        sizes = {size for shape in shapes for size in shape}
        return (
            "products with adapters"
            if rank in sizes
            else "products of the head"
            if vocabulary in sizes
            else "products of the base"
        )
    for kind, parts in _KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other"
