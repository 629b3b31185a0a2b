"""The shuffled order of an epoch: every prompt once, found both ways, no order likelier than another, at no cost in advance."""

import itertools
from collections import Counter

import pytest

from replay.lease_ids import Key
from replay.prompt_ledger import EpochOrder, Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_every_number_has_one_place_and_is_found_there(size: int) -> None:
    for text in ("0 0", "0 1", "7 0"):
        order = Permutation(size, text)
        numbers = [order.at(place) for place in range(size)]
        assert sorted(numbers) == list(range(size))
        assert [order.place_of(number) for number in numbers] == list(range(size))


@pytest.mark.long
def test_the_six_orders_of_three_are_equally_likely() -> None:
    counts = Counter(tuple(Permutation(3, f"{seed} 0").at(place) for place in range(3)) for seed in range(3000))
    assert len(counts) == 6
    chi_squared = sum((count - 500) ** 2 / 500 for count in counts.values())
    assert chi_squared < 20.5, "one in a thousand is above that, with 5 degrees of freedom"


@pytest.mark.long
def test_a_place_has_every_number_equally_often_and_neighbours_are_far_apart() -> None:
    counts = Counter(Permutation(10, f"0 {epoch}").at(3) for epoch in range(5000))
    assert sum((counts[number] - 500) ** 2 / 500 for number in range(10)) < 27.9, "with 9 degrees of freedom"
    order = Permutation(10_000, "0 0")
    numbers = [order.at(place) for place in range(10_000)]
    distances = [abs(a - b) for a, b in itertools.pairwise(numbers)]
    assert sum(distances) / len(distances) == pytest.approx(10_000 / 3, rel=0.03), "as of two drawn at random"


def test_an_epoch_of_a_hundred_million_prompts_begins_at_once() -> None:
    order = EpochOrder(100_000_000, 0, shuffle=True)  # a table of it would take 800 MB, and many seconds
    keys = [order.next() for _ in range(5)]
    assert len({key.prompt_id for key in keys}) == 5
    assert not any(map(order.is_ahead, keys))
    state = order.state()
    again = EpochOrder(100_000_000, 0, shuffle=True)
    again.restore(state)
    after = order.next()
    assert (again.is_ahead(after), again.next()) == (True, after)
    assert order.is_ahead(Key(1, keys[0].prompt_id))
    assert not order.is_ahead(Key(0, 5, 1))
