"""Attention over a tree, by three kernels: each token attends to those before it on its own path from a root, and to itself.

Guarantee: queries, keys and values are those of the tree's places, each once, and no kernel computes padding. The
description of a tree for a kernel is made on the CPU, once for all layers and their recomputations. No layer waits for a number
of the device. Sliding windows count positions, grouped heads and softcaps are those of the model.

    segments   on a CPU: torch's attention of CPUs, segment by segment; all that continues a segment attends to it in one piece
    flash      FlashAttention over the keys of each segment's path, one path behind the other
    flex       torch's flex_attention, compiled for the card, by a block mask
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.flex_attention import flex_attention_forward

from consumer.learn.tree import Segment, Tree

_BLOCK = 128  # of flex_attention, in places

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Options(NamedTuple):
    """The way in which a layer attends.

    Args:
        scaling: of the products of queries and keys; None: one by the root of their size.
        window: positions that a token attends to, its own among them; None: all.
        softcap: bound of a scaled product; None: there is none.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None


class TreeKernel(Protocol):
    """Attention over one tree."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that it keeps on the device."""

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "TreeKernel":
        """Return the same kernel with its tensors elsewhere."""

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Return (1, S, heads, size), from a layer's queries (1, heads, S, size), keys and values (1, groups, S, size)."""


class SegmentKernel:
    """The kernel of CPUs."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._depth = int(tree.positions.max()) + 1
        self.tensors = dict[str, torch.Tensor]()

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return this kernel: it keeps none."""
        return self

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        if options.softcap is None and (options.window is None or options.window >= self._depth):
            found = _Cascade.apply(query, key, value, self._tree.segments, options.scaling)
        else:
            found = torch.cat(
                [self._of_segment(segment, query, key, value, options) for segment in self._tree.segments], 2
            )
        return found.transpose(1, 2)

    def _of_segment(
        self, segment: Segment, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Return (1, heads, T, size), of a layer with a window or a softcap."""
        path = [*self._tree.ancestors(segment), segment]
        places = np.concatenate([np.arange(each.start, each.end) for each in path])
        positions = np.arange(len(places))
        own = positions[segment.position :, None]
        sees = positions <= own
        if options.window is not None:
            first = max(0, segment.position - options.window + 1)
            places, sees = places[first:], (sees & (own - positions < options.window))[:, first:]
        index, mask = torch.from_numpy(places), torch.from_numpy(sees)
        query = query[:, :, segment.start : segment.end]
        key, value = key.index_select(2, index), value.index_select(2, index)
        if options.softcap is None:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=options.scaling, enable_gqa=True
            )
        key, value = (each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value))
        scaling = query.size(-1) ** -0.5 if options.scaling is None else options.scaling
        scores = options.softcap * torch.tanh(query @ key.transpose(2, 3) * (scaling / options.softcap))
        weights = scores.masked_fill(~mask, -torch.inf).softmax(
            -1, dtype=torch.promote_types(scores.dtype, torch.float32)
        )
        return weights.to(value.dtype) @ value


class _Cascade(torch.autograd.Function):  # type: ignore[misc]
    """Attention of a tree as a sum of parts without padding: each segment attends to itself, and all that continue a segment,
    which lie behind it without a gap, attend to all of it.

    Parts are put together by their log-sums L_i of exponentials: with L = log Σ exp L_i the output is Σ exp(L_i - L) o_i. The
    backward pass of a part takes the whole output and L, because its weights are exp(score - L) (FlashAttention-2,
    arXiv:2307.08691, algorithm 2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: tuple[Segment, ...],
        scaling: float | None,
    ) -> torch.Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        found = torch.empty_like(query.transpose(1, 2), dtype=exact, memory_format=torch.contiguous_format).transpose(
            1, 2
        )
        log_sums = torch.empty(query.shape[:3], dtype=exact)
        for part in _parts(segments):
            output, log_sum = _flash(*part.of(query, key, value), is_causal=part.is_own, scale=scaling)
            log_sum = log_sum.to(exact)
            if part.is_own:
                found[:, :, part.queries], log_sums[:, :, part.queries] = output, log_sum
                continue
            before = log_sums[:, :, part.queries].clone()
            log_sums[:, :, part.queries] = both = torch.logaddexp(before, log_sum)
            found[:, :, part.queries] *= (before - both).exp_()[..., None]
            found[:, :, part.queries].addcmul_(output.to(exact), (log_sum - both).exp_()[..., None])
        found = found.to(query.dtype)
        ctx.save_for_backward(query, key, value, found, log_sums)
        ctx.segments, ctx.scaling = segments, scaling
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, found, log_sums = ctx.saved_tensors
        gradients = [torch.zeros_like(each) for each in (query, key, value)]
        for part in _parts(ctx.segments):
            output = (each[:, :, part.queries] for each in (gradient, found, log_sums))
            of_output, own_output, log_sum = output
            parts = _flash_backward(
                of_output, *part.of(query, key, value), own_output, log_sum, 0.0, part.is_own, scale=ctx.scaling
            )
            for whole, each, places in zip(gradients, parts, (part.queries, part.keys, part.keys), strict=True):
                whole[:, :, places] += each
        return *gradients, None, None


class _Part(NamedTuple):
    """Queries that attend to all of these keys, or to those up to their own."""

    queries: slice
    keys: slice
    is_own: bool

    def of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return query[:, :, self.queries], key[:, :, self.keys], value[:, :, self.keys]


def _parts(segments: tuple[Segment, ...]) -> Iterator[_Part]:
    """Yield the part of a segment with itself before those with others."""
    for start, end, *_ in segments:
        yield _Part(slice(start, end), slice(start, end), True)
    for start, end, _, _, reach in segments:
        if reach > end:
            yield _Part(slice(end, reach), slice(start, end), False)


class FlashKernel:
    """FlashAttention's function for rows of any length, `flash_attn_varlen_func`.

    Args:
        function: of the package flash-attn, or another with the same arguments.
    """

    def __init__(self, tree: Tree, function: Callable[..., Any]) -> None:
        paths = [[*tree.ancestors(segment), segment] for segment in tree.segments]
        own, whole = [len(each) for each in tree.segments], [sum(map(len, path)) for path in paths]
        self._function, self._longest = function, (max(own), max(whole))
        self.tensors = {
            "keys": torch.cat([torch.arange(each.start, each.end) for path in paths for each in path]),
            "query_starts": _starts(own),
            "key_starts": _starts(whole),
        }

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the same kernel with its tensors elsewhere."""
        other = copy.copy(self)
        other.tensors = dict(tensors)
        return other

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        dtype = get_target_dtype(query, module) or query.dtype
        query, key, value = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
        keys, query_starts, key_starts = self.tensors.values()
        more: dict[str, Any] = {} if options.softcap is None else {"softcap": options.softcap}
        if options.window is not None:
            more["window_size"] = (options.window - 1, 0)
        found = self._function(
            query, key.index_select(0, keys), value.index_select(0, keys), query_starts, key_starts, *self._longest,
            softmax_scale=options.scaling, causal=True, **more,
        )  # fmt: skip
        return (found[0] if isinstance(found, tuple) else found)[None]


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


class FlexKernel:
    """torch's flex_attention, as transformers compiles it. A place attends to those before it whose segments reach it."""

    def __init__(self, tree: Tree, windows: frozenset[int]) -> None:
        reach = np.concatenate([np.full(len(segment), segment.reach) for segment in tree.segments])
        self._size = len(reach)
        self._windows: list[int | None] = [None, *sorted(windows)]
        self.tensors = {"reach": torch.from_numpy(reach), "positions": torch.from_numpy(tree.positions)}
        for window in self._windows:
            partial, full = _blocks(reach, tree.positions, window)
            mask = BlockMask.from_kv_blocks(*_listed(partial), *_listed(full), _BLOCK, seq_lengths=(self._size,) * 2)
            self.tensors |= {f"{name} {window}": getattr(mask, name) for name in _OF_MASK}
        self._masks = dict[int | None, BlockMask]()

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the same kernel with its tensors elsewhere."""
        other = copy.copy(self)
        other.tensors = dict(tensors)
        other._masks = {window: other._mask(window) for window in self._windows}
        return other

    def _mask(self, window: int | None) -> BlockMask:
        reach, positions = self.tensors["reach"], self.tensors["positions"]

        def attends(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < reach[key])

        def attends_within(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return attends(batch, head, query, key) & (positions[query] - positions[key] < window)

        fields = {name: self.tensors[f"{name} {window}"] for name in _OF_MASK}
        chosen = attends if window is None else attends_within
        return BlockMask((self._size,) * 2, **fields, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=chosen)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        mask = self._masks[options.window]
        found, _ = flex_attention_forward(
            module, query, key, value, mask, scaling=options.scaling, softcap=options.softcap
        )
        return found


_OF_MASK = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)


def _blocks(
    reach: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tables: does a block of queries (row) attend to some, and to all keys of a block (column)?"""
    starts = np.arange(0, len(reach), _BLOCK)
    ends = np.append(starts[1:], len(reach))

    def of_each(function: np.ufunc, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return function.reduceat(values, starts)

    behind = starts[:, None] > starts
    some = (behind & (of_each(np.maximum, reach) > starts[:, None])) | np.eye(len(starts), dtype=bool)
    whole = ends - starts == _BLOCK
    every = behind & whole[:, None] & whole & (of_each(np.minimum, reach) >= ends[:, None])
    if window is not None:
        first, last = of_each(np.minimum, positions), of_each(np.maximum, positions)
        some &= first[:, None] - last < window
        every &= last[:, None] - first < window
    return torch.from_numpy(some & ~every), torch.from_numpy(every)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of blocks of keys for each block of queries, (1, 1, N), and which, first, (1, 1, N, N)."""
    which = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], which.int()[None, None]
