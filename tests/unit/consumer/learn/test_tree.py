"""A tree has every row as a path of whole segments, and every beginning that rows share once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.learn.tree import STEP, Row, shared_beginnings, shared_within, tree_of, tree_order
from tests.unit.consumer.learn.trees import is_without_gaps, rows_of_trees


def row(prompt: list[int], completion: list[int]) -> Row:
    return Row(np.array(prompt, np.int64), np.array(completion, np.int64))


@pytest.mark.long
@given(rows_of_trees())
def test_every_row_is_a_path_from_a_root(rows: list[Row]) -> None:
    tree = tree_of(rows)
    assert is_without_gaps(tree)
    paths = [[*tree.ancestors(segment), segment] for segment in tree.segments]
    for own, places in zip(rows, tree.places, strict=True):
        assert tree.ids[places].tolist() == [*own.prompt, *own.completion]
        assert tree.positions[places].tolist() == list(range(own.num_tokens))
        [path] = [path for path in paths if path[-1].start <= places[-1] < path[-1].end]
        assert [place for segment in path for place in range(segment.start, segment.end)] == places.tolist()


@pytest.mark.long
@given(rows_of_trees())
def test_all_that_continues_a_segment_lies_directly_behind_it(rows: list[Row]) -> None:
    tree = tree_of(rows)
    for segment in tree.segments:
        behind = [other for other in tree.segments if segment in tree.ancestors(other)]
        assert behind == [other for other in tree.segments if segment.end <= other.start < segment.reach]


@pytest.mark.long
@given(rows_of_trees(), st.data())
def test_the_places_of_any_of_the_rows_are_a_sum(rows: list[Row], data: Any) -> None:
    ordered = [rows[index] for index in tree_order(rows)]
    shared = shared_beginnings(ordered)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True).map(sorted))
    own = [ordered[index] for index in chosen]
    assert shared_within(shared, chosen) == shared_beginnings(own)
    assert len(tree_of(own).ids) == sum(each.num_tokens for each in own) - sum(shared_beginnings(own))


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = [row([1, 2], [3] * 20), row([1, 2], [3] * 20 + [4]), row([5], [6])]
    tree, again = tree_of(rows), tree_of(rows[::-1])
    assert tree.ids.tolist() == again.ids.tolist()
    assert [places.tolist() for places in tree.places] == [places.tolist() for places in again.places[::-1]]


def test_nothing_shared_is_nothing_shared_within() -> None:
    assert shared_within([0, 3], []) == []


ONE, OTHER = [1] * (2 * STEP + 3), [2] * 5


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(OTHER, [3]), row(OTHER, [4])], 5),  # a prompt, however short
        ([row(ONE, [3]), row([*ONE, 9], [3])], 2 * STEP),  # prompts that begin alike
        ([row(OTHER, [*ONE, 3]), row(OTHER, [*ONE, 4])], 5 + 2 * STEP),
        ([row(OTHER, [*ONE[:9], 3]), row(OTHER, [*ONE[:9], 4])], 5),  # too little to pay
        ([row([1], ONE), row([2], ONE)], 0),
        ([row(OTHER, ONE), row(OTHER, ONE)], 5 + 2 * STEP),
    ],
)
def test_what_is_shared(rows: list[Row], expected: int) -> None:
    assert shared_beginnings(rows) == [0, expected]
