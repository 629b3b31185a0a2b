"""Computing in float64, where rounding can neither hide nor fake an error of a formula.

Guarantee: within `in_float64`, the model of the tests (or those of the modules given) and TRL compute in float64 also what they
compute in float32 to be safe: norms, rotary embeddings, the gradient of the LM head. Two ways to compute the same then differ by
some 1e-15 of it, on every CPU and with any number of threads; two formulas differ as much as they do on paper.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.qwen2 import modeling_qwen2

from protocol.runtime.processes import block_import

with block_import("vllm"):
    from trl.kernels import chunked_logprob


class _Torch:
    """As these modules know it."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(*modules: ModuleType) -> Iterator[None]:
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as patches:
        for module in (modeling_qwen2, chunked_logprob, *modules):
            patches.enter_context(patch.object(module, "torch", _Torch()))
        patches.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        patches.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.float64)
        yield
