"""Computing in float64, where rounding can neither hide nor fake an error of a formula.

Guarantee: within `in_float64`, whatever asks torch for float32 gets float64, also the parts of transformers and TRL that do so to
be safe (norms, rotary embeddings). Two ways to compute the same then differ by some 1e-15 of its magnitude, on every CPU and
with any number of threads; two formulas differ as much as they do on paper. Torch leaves a mode before a backward pass: what is
Python there (`torch.autograd.Function`) is decorated with `in_float64` where it asks for float32.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def is_wide() -> bool:
    return torch.get_default_dtype() == torch.float64


class _Widened(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(_wide, args), **wide)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
