"""The pass through a linear layer with a LoRA adapter, without sums and products over its whole output but those of its weights.

Guarantee: outputs and gradients are those of PEFT's `lora.Linear`, in float32 to the rounding of a sum; modules, parameters and
their names stay. With base weight W, adapter A (r x in), B (out x r), scaling s and the gradient g of the output:

    y = x W' + bias + s (x A') B'        dx = g W + s (g B) A        dA = s (g B)' x        dB = s g' (x A')

PEFT makes (x A') B', multiplies it by s, and adds it to x W': three passes over the wide output, and two back. Here the matrix
product itself scales and adds to the tensor that is there. Layers that are more than that are left to PEFT: those with dropout,
biases or variants of LoRA, several adapters or none, quantized or trained bases, and mixed precision without autocast.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch.autograd.function import once_differentiable


class AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]
    """The sum x W' + bias + s (x A') B' (N, out), for rows x (N, in), frozen W (out, in), bias (out,) or None, A (r, in) and
    B (out, r), all of one type."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        narrow = x @ a.T
        ctx.save_for_backward(x, narrow, weight, a, b)
        ctx.scaling = scaling
        return torch.nn.functional.linear(x, weight, bias).addmm_(narrow, b.T, alpha=scaling)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, narrow, weight, a, b = ctx.saved_tensors
        back = gradient @ b
        of_x = (gradient @ weight).addmm_(back, a, alpha=ctx.scaling) if ctx.needs_input_grad[0] else None
        of_a = (back.T @ x).mul_(ctx.scaling) if ctx.needs_input_grad[3] else None
        of_b = (gradient.T @ narrow).mul_(ctx.scaling) if ctx.needs_input_grad[4] else None
        return of_x, None, None, of_a, of_b, None


class AdaptedLinear(Linear):  # type: ignore[misc]
    """PEFT's layer, which passes through `AdaptedProduct` where that computes the same."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return (..., out) for x (..., in)."""
        if args or kwargs or not self._is_simple():
            return super().forward(x, *args, **kwargs)
        [name], base = self.active_adapters, self.get_base_layer()
        a, b, dtype = self.lora_A[name].weight, self.lora_B[name].weight, base.weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            is_one_type = dtype == torch.get_autocast_dtype(x.device.type)
        else:
            is_one_type = x.dtype == a.dtype == b.dtype == dtype
        if not is_one_type:
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        out = AdaptedProduct.apply(rows, base.weight, base.bias, a.to(dtype), b.to(dtype), self.scaling[name])
        return out.view(*x.shape[:-1], out.shape[-1])

    def _is_simple(self) -> bool:
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return False
        [name] = self.active_adapters
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias[name]:
            return False
        dropout = self.lora_dropout[name]
        drops = isinstance(dropout, torch.nn.Dropout) and self.training and dropout.p > 0
        return not drops and not any(parameter.requires_grad for parameter in self.get_base_layer().parameters())


def use_adapted_products(model: torch.nn.Module) -> None:
    """Let every LoRA layer over a plain linear layer pass through `AdaptedProduct` where it can."""
    for module in model.modules():
        if type(module) is Linear and type(module.get_base_layer()) is torch.nn.Linear:
            module.__class__ = AdaptedLinear
