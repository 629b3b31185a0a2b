"""Layers whose weight vLLM's CPU build has packed, and dropped in its first form.

Guarantee: a weight that is read from a packed layer, or packed for it, has the bits with which the layer computes. (vLLM's layers
are used by their attributes: there is no import.)
"""

from collections.abc import Callable
from typing import Any

import torch

_ROWS = 1024  # of the unit matrix that asks a packed layer for its weights


def is_packed(layer: Any) -> bool:
    """Return whether vLLM's CPU build has packed the weight and dropped the original."""
    return bool(layer.weight.numel() == 0)


def unpacked(layer: Any) -> torch.Tensor:
    """Return the weight of a packed layer: its output for unit vectors, which is exact, because only zeros are added to each
    number."""
    unit = torch.eye(getattr(layer, "input_size_per_partition", layer.input_size), dtype=layer.weight.dtype)
    with torch.no_grad():
        columns = [layer.quant_method.apply(layer, rows, None) for rows in unit.split(_ROWS)]
    return torch.cat(columns).t().contiguous()


def columns_of(layer: Any, columns: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """Return these columns of a layer's weight as it computes with them, (outputs, C). They are its output for unit vectors,
    which is exact, because only zeros are added to each number."""
    unit = torch.zeros(len(columns), num_inputs, dtype=layer.weight.dtype)
    unit[torch.arange(len(columns)), columns] = 1
    with torch.no_grad():
        return layer.quant_method.apply(layer, unit, None).t()


def packed(layer: Any, weight: torch.Tensor) -> Callable[[], None]:
    """Pack a weight for a layer. The result installs it."""
    linear = packed_linear(layer, weight)

    def install() -> None:
        layer.cpu_linear = linear
        if layer.weight.numel():
            layer.weight.data.copy_(weight)

    return install


def packed_linear(layer: Any, weight: torch.Tensor) -> Any:
    """Pack a weight as the layer does after loading, and return the function that computes with it."""
    stand_in: Any = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    stand_in.bias = getattr(layer, "bias", None)
    layer.quant_method.process_weights_after_loading(stand_in)
    return stand_in.cpu_linear
