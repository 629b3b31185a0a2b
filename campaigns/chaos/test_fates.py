"""What happens to whom, and that a whole round of points is met."""

from campaigns.chaos import aims
from campaigns.chaos.fates import FateDeck


def test_every_point_is_aimed_at_before_any_is_aimed_at_again() -> None:
    deck = FateDeck("producer", seed=1)
    aimed = [fate.point for fate in (deck.draw() for _ in range(400)) if fate.kind == "aimed kill"]
    rounds = len(aims.PRODUCER)
    assert set(aimed[:rounds]) == set(aimed[rounds : 2 * rounds]) == set(aims.PRODUCER)


def test_equal_seeds_give_equal_fates() -> None:
    first, second, other = (FateDeck("trainer", seed) for seed in (1, 1, 2))
    fates = [first.draw() for _ in range(50)]
    assert fates == [second.draw() for _ in range(50)]
    assert fates != [other.draw() for _ in range(50)]
