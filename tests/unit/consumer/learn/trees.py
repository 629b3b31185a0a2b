"""Rows that have beginnings in common, for the tests of trees."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from consumer.learn.tree import STEP, Row, Tree


@st.composite
def rows_of_trees(draw: st.DrawFn, vocabulary: int = 3) -> list[Row]:
    """A few rows of few different tokens, many of which begin alike, some of which are the same."""
    ids = st.integers(1, vocabulary)
    beginnings = draw(st.lists(st.lists(ids, min_size=1, max_size=2 * STEP + 3), min_size=1, max_size=3))
    rows = list[Row]()
    for _ in range(draw(st.integers(1, 6))):
        prompt, begun = draw(st.sampled_from(beginnings)), draw(st.sampled_from(beginnings))
        completion = begun[: draw(st.integers(0, len(begun)))] + draw(st.lists(ids, min_size=1, max_size=STEP + 2))
        rows.append(Row(np.array(prompt), np.array(completion)))
    return rows + draw(st.lists(st.sampled_from(rows), max_size=2))


def some_rows(seed: int = 0, vocabulary: int = 40) -> list[Row]:
    """Two prompts that begin alike and one that does not, completions with branches of branches, one row twice, one alone."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        return draw.integers(1, vocabulary, length)

    system, turn, branch = ids(STEP + 3), ids(2 * STEP + 5), ids(STEP)
    first, second = np.concatenate([system, ids(4)]), np.concatenate([system, ids(9)])
    rows = [Row(first, np.concatenate([turn, ids(5)])), Row(first, np.concatenate([turn, branch, ids(7)]))]
    rows += [Row(first, np.concatenate([turn, branch, ids(2)])), Row(second, ids(3)), Row(second, ids(1))]
    rows += [Row(first, ids(11)), Row(ids(2), ids(6)), rows[1]]
    return [rows[index] for index in draw.permutation(len(rows))]


def attended(tree: Tree, window: int | None = None) -> torch.Tensor:
    """(S, S), whether the place of a row attends to that of a column: those before it in one of its rows, and itself."""
    found = torch.zeros(len(tree.ids), len(tree.ids), dtype=torch.bool)
    for places in map(torch.from_numpy, tree.places):
        found[places[:, None], places] |= torch.ones(len(places), len(places), dtype=torch.bool).tril()
    if window is not None:
        positions = torch.from_numpy(tree.positions)
        found &= positions[:, None] - positions < window
    return found


def is_without_gaps(tree: Tree) -> bool:
    ends = [0, *(segment.end for segment in tree.segments)]
    return all(
        (segment.start, segment.end) == pair for segment, pair in zip(tree.segments, pairwise(ends), strict=True)
    )
