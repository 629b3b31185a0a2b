"""The layout of a pass as a tree: common beginnings of rows are there once. Pure functions over token ids.

Guarantee: every row is a path of whole segments from a root. So each of its tokens comes after the same tokens as in the row
alone. All segments lie in one packed row without padding; behind a segment lie, without a gap, all segments that continue it.
A tree has as many places as its rows have tokens, less those that each shares with the row before it (`shared_beginnings`). So
the size of a pass is a sum over its rows. Equal rows give equal trees on every machine.

The prompt of a group is shared whole. Below and behind it beginnings are shared in steps of `STEP` tokens, because a segment
costs more than a few tokens save: system prompts, turns and branches of an episode, completions that begin alike.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEP = 16
"""Tokens in which shared beginnings are counted, but for a whole prompt."""

Ids = NDArray[np.integer]


class Row(NamedTuple):
    """The token ids of a prompt, and of its completion."""

    prompt: Ids
    completion: Ids

    @property
    def num_tokens(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.completion)


class Segment(NamedTuple):
    """A run of places of a tree that every row takes as a whole or not at all."""

    start: int  # place of its first token
    end: int  # place behind its last token
    parent: int  # index of the segment that it continues; -1: none
    position: int  # of its first token within its rows
    reach: int  # place behind the last segment that continues it

    def __len__(self) -> int:
        return self.end - self.start


class Tree(NamedTuple):
    """Rows as one packed row of S places.

    Args:
        ids: (S,) token ids.
        positions: (S,) of each within its rows.
        segments: in the order of their places.
        places: of each row, in the order given, the place of each of its tokens.
    """

    ids: Ids
    positions: NDArray[np.int64]
    segments: tuple[Segment, ...]
    places: list[NDArray[np.int64]]

    def ancestors(self, segment: Segment) -> list[Segment]:
        """Return the segments that this one continues, from the root on."""
        found: list[Segment] = []
        while segment.parent >= 0:
            segment = self.segments[segment.parent]
            found.append(segment)
        return found[::-1]


def tree_order(rows: Sequence[Row]) -> list[int]:
    """Return the indexes of the rows, with rows that begin alike side by side."""
    keys = [tuple(ids.astype(">u4").tobytes() for ids in row) for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def shared_beginnings(rows: Sequence[Row]) -> list[int]:
    """Return for each row the number of tokens at its beginning that it shares with the row before it; 0 for the first.

    Args:
        rows: in their `tree_order`.
    """
    return [0, *(_num_shared(*pair) for pair in pairwise(rows))]


def shared_within(shared: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Return the `shared_beginnings` of some of the rows.

    Args:
        shared: of all rows.
        chosen: ascending indexes.
    """
    if not chosen:
        return []
    starts = np.asarray(chosen) + 1
    found = np.minimum.reduceat(np.append(np.asarray(shared), 0), starts)
    return [0, *found[:-1].tolist()]


def _num_shared(one: Row, other: Row) -> int:
    num_alike = _num_alike(one.prompt, other.prompt)
    if num_alike == len(one.prompt) == len(other.prompt):
        return num_alike + _num_alike(one.completion, other.completion) // STEP * STEP
    return num_alike // STEP * STEP


def _num_alike(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class _Run(NamedTuple):
    """Consecutive tokens of the last row that lie on consecutive places."""

    depth: int
    place: int
    length: int


def tree_of(rows: Sequence[Row]) -> Tree:
    """Return the tree of these rows, each with at least one token."""
    order = tree_order(rows)
    shared = shared_beginnings([rows[index] for index in order])
    places: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows)
    tails, path, size = list[Ids](), list[_Run](), 0
    parent_of = dict[int, int]()  # from the place where a segment begins to the place that it continues
    for index, num_shared in zip(order, shared, strict=True):
        path = _cut(path, num_shared)
        if path:
            last = path[-1].place + path[-1].length - 1
            parent_of.setdefault(last + 1, last)  # where the row before goes on without this one
        tail = np.concatenate(rows[index])[num_shared:]
        if len(tail):
            parent_of[size] = last if path else -1
            path.append(_Run(num_shared, size, len(tail)))
            tails.append(tail)
            size += len(tail)
        places[index] = np.concatenate([np.arange(run.place, run.place + run.length) for run in path])
    parent_of.pop(size, None)
    positions = np.empty(size, np.int64)
    for own in places:
        positions[own] = np.arange(len(own))
    return Tree(np.concatenate(tails), positions, _segments(parent_of, positions), places)


def _cut(path: Iterable[_Run], depth: int) -> list[_Run]:
    """Return the part of a path before this depth."""
    return [run._replace(length=min(run.length, depth - run.depth)) for run in path if run.depth < depth]


def _segments(parent_of: dict[int, int], positions: NDArray[np.int64]) -> tuple[Segment, ...]:
    starts = sorted(parent_of)
    ends = [*starts[1:], len(positions)]
    parents = [int(np.searchsorted(starts, parent_of[start], "right")) - 1 for start in starts]
    reach = list(ends)
    for index in range(len(starts) - 1, -1, -1):
        if parents[index] >= 0:
            reach[parents[index]] = max(reach[parents[index]], reach[index])
    return tuple(
        Segment(start, end, parent, int(positions[start]), until)
        for start, end, parent, until in zip(starts, ends, parents, reach, strict=True)
    )
