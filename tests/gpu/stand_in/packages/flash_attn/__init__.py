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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend within rows that lie one behind the other, (tokens, heads, size). The last query of a row is at its last key."""
    calls.append("flash_attn_varlen_func")
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.is_cuda
        assert starts.dtype == torch.int32
    assert not dropout_p
    assert not softcap
    rows = []
    for starts, longest, tokens in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert isinstance(longest, int), "the host would wait for it"
        places = starts.cpu().tolist()
        assert (places[0], places[-1]) == (0, len(tokens))
        rows.append(list(itertools.pairwise(places)))
        assert max(end - begin for begin, end in rows[-1]) <= longest
    parts = [
        _attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], softmax_scale, causal, window_size[0])
        for (q0, q1), (k0, k1) in zip(*rows, strict=True)
    ]
    return torch.cat(parts, dim=1)[0]


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    raise NotImplementedError("no trainer generates")


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None, causal: bool, window: int = -1
) -> torch.Tensor:
    for each in (q, k, v):
        assert each.is_cuda, "FlashAttention only supports CUDA tensors"
        assert each.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16 and bf16 data type"
        assert each.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    mask = (distance >= 0 if causal else torch.full_like(distance, True)) & (
        distance <= (window if window >= 0 else len(k[0]))
    )
    found = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask.to(q.device),
        scale=softmax_scale,
        enable_gqa=True,
    )
    return found.transpose(1, 2)
