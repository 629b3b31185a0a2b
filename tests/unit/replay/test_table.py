"""First in, first out, full batches or nothing, and no group is dropped silently."""

from replay.table import FifoTable

from .builders import group


def table(*versions: int) -> FifoTable:
    result = FifoTable()
    for index, version in enumerate(versions):
        result.insert(group(f"g{index}", version))
    return result


def names(groups: list) -> list[str]:
    return [g.group_id for g in groups]


def test_groups_leave_in_the_order_they_came() -> None:
    queue = table(0, 0, 0, 0, 0)
    assert names(queue.cut(2)) == ["g0", "g1"]
    assert names(queue.cut(2)) == ["g2", "g3"]
    assert len(queue) == 1


def test_a_batch_is_full_or_not_cut() -> None:
    queue = table(0, 0)
    assert queue.cut(3) is None
    assert len(queue) == 2
    assert FifoTable().cut(1) is None


def test_old_groups_come_out_and_the_others_keep_their_order() -> None:
    queue = table(3, 1, 2, 0, 3)
    assert names(queue.evict_older_than(2)) == ["g1", "g3"]
    assert queue.evict_older_than(2) == []
    assert names(queue.cut(3)) == ["g0", "g2", "g4"]
