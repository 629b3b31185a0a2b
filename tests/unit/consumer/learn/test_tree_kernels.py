"""Every kernel computes, in float64, what attention with a dense mask computes, and its gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_mask

from consumer.learn.tree import Row, Tree, tree_of
from consumer.learn.tree_kernels import FlashKernel, FlexKernel, Options, SegmentKernel, TreeKernel, _blocks
from tests.unit.consumer.learn.trees import attended, rows_of_trees, some_rows

TOLERANCE = 1e-12
WINDOW = 5


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """As flash-attn's: the last query of a segment is at the last of its keys."""
    assert causal
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert longest_query == int(query_starts.diff().max())
    assert longest_key == int(key_starts.diff().max())
    found = []
    for q, k, v in zip(
        query.split(query_starts.diff().tolist()), key.split(key_starts.diff().tolist()),
        value.split(key_starts.diff().tolist()), strict=True,
    ):  # fmt: skip
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        found.append(dense(q, k, v, mask, Options(softmax_scale, None, softcap or None))[0].transpose(0, 1))
    return torch.cat(found)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, options: Options
) -> torch.Tensor:
    """(1, heads, S, size), by all scores."""
    key, value = (each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.size(-1) ** -0.5 if options.scaling is None else options.scaling)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


KERNELS: dict[str, Callable[[Tree], TreeKernel]] = {
    "segments": SegmentKernel,
    "flash": lambda tree: FlashKernel(tree, varlen),
}
OPTIONS = [
    Options(),
    Options(scaling=0.7),
    Options(window=WINDOW),
    Options(window=1000),
    Options(softcap=0.8),
    Options(0.9, WINDOW, 1.1),
]


def inputs(tree: Tree, heads: int = 4, groups: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(tree.ids))

    def drawn(count: int) -> torch.Tensor:
        found = torch.randn(1, len(tree.ids), count, 8, dtype=torch.float64, generator=generator)
        return found.transpose(1, 2).requires_grad_()  # as layers make them

    return [drawn(heads), drawn(groups), drawn(groups)]


def with_gradients(found: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.arange(found.numel(), dtype=torch.float64).sin().view(found.shape)
    return [found, *torch.autograd.grad((found * weights).sum(), leaves)]


def compare(tree: Tree, kernel: TreeKernel, options: Options) -> None:
    module: Any = None
    leaves = query, key, value = inputs(tree)
    ours = with_gradients(kernel(module, query, key, value, options), leaves)
    expected = dense(query, key, value, attended(tree, options.window), options).transpose(1, 2)
    torch.testing.assert_close(ours, with_gradients(expected, leaves), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_and_gradients(kernel: str, options: Options) -> None:
    tree = tree_of(some_rows())
    compare(tree, KERNELS[kernel](tree), options)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS[::2])
@settings(max_examples=20)
@given(rows=rows_of_trees())
def test_random_trees(options: Options, rows: list[Row]) -> None:
    tree = tree_of(rows)
    compare(tree, SegmentKernel(tree), options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_numbers(dtype: torch.dtype) -> None:
    """Rounded as torch's own attention is."""
    tree = tree_of(some_rows())
    module: Any = None
    query, key, value = (each.detach().to(dtype) for each in inputs(tree))
    found = SegmentKernel(tree)(module, query, key, value, Options())
    assert found.dtype == dtype
    expected = dense(query.double(), key.double(), value.double(), attended(tree), Options()).transpose(1, 2)
    assert (found - expected).abs().max() < 8 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.long
@settings(max_examples=20)
@given(rows=rows_of_trees())
def test_the_masks_of_flex_attention(rows: list[Row]) -> None:
    tree = tree_of(rows)
    kernel = FlexKernel(tree, frozenset({WINDOW}))
    masks = kernel.with_tensors(kernel.tensors)._masks
    for window in (None, WINDOW):
        assert masks[window].shape == (1, 1, len(tree.ids), len(tree.ids))
        found = create_mask(masks[window].mask_mod, 1, 1, len(tree.ids), len(tree.ids), device="cpu")
        assert torch.equal(found[0, 0], attended(tree, window))


@pytest.mark.parametrize("window", [None, 40, 300])
def test_the_blocks_of_flex_attention(window: int | None) -> None:
    """No block without a pair that attends need be computed, and one that is computed whole has no other pair."""
    rows = [Row(each.prompt.repeat(12), each.completion.repeat(9)) for each in some_rows()]
    tree = tree_of(rows)
    reach = torch.cat([torch.full((len(each),), each.reach) for each in tree.segments]).numpy()
    partial, full = _blocks(reach, tree.positions, window)
    size = 128 * len(partial)
    whole = torch.zeros(size, size)
    whole[: len(reach), : len(reach)] = attended(tree, window)
    of_block = whole.view(len(partial), 128, len(partial), 128).sum((1, 3))
    assert not (partial & full).any()
    assert ((of_block == 0) | partial | full).all()
    assert (of_block[full] == 128 * 128).all()
    assert full.any() == (window is None or window > 2 * 128)
    if window is None:
        assert (of_block[partial] > 0).all()
        assert ((of_block == 128 * 128) == full).all()
