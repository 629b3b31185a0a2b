"""Every row is in an epoch, and every source has its share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.prompts.dataset import Mixture

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=4)


def test_by_hand() -> None:
    assert Mixture([3, 2], None).counts == [3, 2]
    assert Mixture([3, 2], [1, 1]).counts == [3, 3]
    assert Mixture([100, 10], [0.5, 0.5]).counts == [100, 100]
    assert Mixture([100, 10], [0.9, 0.1]).counts == [100, 11]  # 100 / 0.9 x 0.1, to the nearest row
    mixture = Mixture([2, 1], [1, 2])
    assert [mixture[i] for i in range(len(mixture))] == [(0, 0), (0, 1), (1, 0), (1, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize("prompt_id", [-1, 5])
def test_there_are_no_other_prompts(prompt_id: int) -> None:
    with pytest.raises(IndexError):
        Mixture([3, 2], None)[prompt_id]


@pytest.mark.long
@given(SIZES, st.data())
def test_every_row_comes_and_shares_hold_up_to_a_row(sizes: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    mixture = Mixture(sizes, weights)
    places = [mixture[prompt_id] for prompt_id in range(len(mixture))]
    assert set(places) == {(source, row) for source, size in enumerate(sizes) for row in range(size)}
    per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    for source, weight in enumerate(weights):
        assert abs(sum(place[0] == source for place in places) - per_weight * weight) <= 0.5 + 1e-9
