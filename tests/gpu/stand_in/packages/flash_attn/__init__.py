"""flash-attn's functions, computed by torch's own attention.

Guarantee: what its kernels demand of their arguments is demanded: the GPU, 16 bits, the last dimension without gaps, and where
rows begin as int32 on the GPU. `calls` has the names of the functions in the order of their calls.
"""

import itertools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "2.8.3"
calls: list[str] = []


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Attend from (B, T, heads, size)."""
    calls.append("flash_attn_func")
    return _attention(q, k, v, softmax_scale, causal)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Attend within rows that lie one behind the other, (tokens, heads, size)."""
    calls.append("flash_attn_varlen_func")
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.is_cuda
        assert starts.dtype == torch.int32
    assert isinstance(max_seqlen_q, int), "the host would wait for it"
    starts_q = cu_seqlens_q.cpu().tolist()
    assert starts_q == cu_seqlens_k.cpu().tolist()
    assert starts_q[0] == 0
    assert starts_q[-1] == len(q)
    rows = list(itertools.pairwise(starts_q))
    assert max(end - begin for begin, end in rows) <= max_seqlen_q
    parts = [
        _attention(q[None, begin:end], k[None, begin:end], v[None, begin:end], softmax_scale, causal)
        for begin, end in rows
    ]
    return torch.cat(parts, dim=1)[0]


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    raise NotImplementedError("no trainer generates")


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None, causal: bool
) -> torch.Tensor:
    for each in (q, k, v):
        assert each.is_cuda, "FlashAttention only supports CUDA tensors"
        assert each.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16 and bf16 data type"
        assert each.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    found = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        is_causal=causal and q.shape[1] == k.shape[1], scale=softmax_scale, enable_gqa=True,
    )  # fmt: skip
    return found.transpose(1, 2)
