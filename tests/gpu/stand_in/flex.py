"""torch's flex_attention, which inductor compiles for a card, computed from all scores.

Guarantee: scores, masks and block tables are those of the call. What the block tables leave out is not attended to, also where
the mask would, and blocks that they call full are attended to as a whole.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations import flex_attention as of_transformers

calls: list[tuple[int, ...]] = []
"""The shapes of the queries."""


def install() -> None:
    """Stand in for what transformers compiles."""
    of_transformers.compile_friendly_flex_attention = flex_attention


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    training: bool = False,
    *,
    score_mod: Callable[..., torch.Tensor],
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    **_: Any,
) -> tuple[torch.Tensor, Any]:
    """Attend from (1, heads, S, size)."""
    calls.append(tuple(query.shape))
    for each in (query, key, value, block_mask.kv_indices, block_mask.full_q_indices):
        assert each is not None
        assert each.is_cuda
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value))
    places = torch.arange(query.size(2), device=query.device)
    mask = block_mask.mask_mod(places, places, places[:, None], places)
    assert block_mask.full_kv_num_blocks is not None
    assert block_mask.full_kv_indices is not None
    full = _in_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, mask)
    mask = full | mask & _in_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, mask)
    scores = score_mod(query @ key.transpose(2, 3) * scale, places, places, places[:, None], places)
    scores = scores.float().masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


def _in_blocks(counts: torch.Tensor, indices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(S, S), 1 for the pairs of places in the blocks that are listed."""
    counts, indices = counts[0, 0].cpu(), indices[0, 0].cpu()
    found = torch.zeros(indices.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        found[row, indices[row, :count].long()] = True
    whole = found.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return whole[: len(like), : len(like)].to(like.device)
