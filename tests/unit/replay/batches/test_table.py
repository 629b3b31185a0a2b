"""First in, first out, and no group leaves unasked."""

from replay.batches.queue import FifoTable
from tests.unit.replay.builders import group, names


def table(*versions: int) -> FifoTable:
    result = FifoTable()
    for index, version in enumerate(versions):
        result.insert(group(f"g{index}", version))
    return result


def test_the_oldest_groups_come_first_and_stay_until_removed() -> None:
    queue = table(0, 0, 0, 0, 0)
    first = queue.first(2)
    assert names(first) == names(queue.first(2)) == ["g0", "g1"]
    assert len(queue) == 5
    queue.remove(first)
    assert names(queue.first(3)) == ["g2", "g3", "g4"]
    assert len(queue) == 3


def test_there_are_at_most_as_many_as_wait() -> None:
    assert names(table(0, 0).first(3)) == ["g0", "g1"]
    assert FifoTable().first(1) == []


def test_old_groups_are_named_in_order_and_stay_until_removed() -> None:
    queue = table(3, 1, 2, 0, 3)
    old = queue.older_than(2)
    assert names(old) == ["g1", "g3"]
    assert len(queue) == 5
    queue.remove(old)
    assert queue.older_than(2) == []
    assert names(queue.first(3)) == ["g0", "g2", "g4"]


def test_removing_what_is_not_there_changes_nothing() -> None:
    queue = table(0)
    queue.remove([group("other")])
    assert names(queue.first(1)) == ["g0"]
