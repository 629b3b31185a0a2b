"""The order in which producers get leases: always the one with the most room, whatever happened to the others."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from consumer.link.sessions import ProducerSession, RoomQueue


def queue_of(*capacities: int) -> tuple[RoomQueue, dict[bytes, ProducerSession]]:
    sessions = {f"{number}".encode(): ProducerSession(f"{number}", room, 0.0) for number, room in enumerate(capacities)}
    queue = RoomQueue(lambda session: session.room)
    queue.refill(sessions.items())
    return queue, sessions


def drained(queue: RoomQueue) -> list[bytes]:
    """Each is given leases until it has no room."""
    order: list[bytes] = []
    while (taken := queue.take()) is not None:
        peer, session = taken
        session.leases.add(f"{len(order)}")
        queue.note(peer, session)
        order.append(peer)
    return order


def test_the_one_with_the_most_room_is_first_and_equals_take_turns() -> None:
    queue, _ = queue_of(1, 3, 0, 2)
    assert drained(queue) == [b"1", b"3", b"1", b"0", b"3", b"1"]


def test_one_that_left_gets_nothing() -> None:
    queue, sessions = queue_of(2, 1)
    sessions[b"0"].end()
    assert drained(queue) == [b"1"]


def test_one_whose_room_shrank_is_where_it_belongs_now() -> None:
    queue, sessions = queue_of(5, 3)
    sessions[b"0"].capacity = 1
    assert drained(queue) == [b"1", b"1", b"0", b"1"]


def test_who_was_not_noted_is_found_by_a_refill() -> None:
    queue, sessions = queue_of(0, 1)
    sessions[b"0"].capacity = 2
    assert drained(queue) == [b"1"]
    queue.refill(sessions.items())
    assert drained(queue) == [b"0", b"0"]


@given(st.lists(st.tuples(st.sampled_from(["lease", "answer", "capacity"]), st.integers(0, 4), st.integers(0, 3))))
def test_it_is_the_maximum_over_all_producers(events: list[tuple[str, int, Any]]) -> None:
    """Beside a queue that looks at everybody."""
    queue, sessions = queue_of(3, 1, 0, 2, 2)
    for number, (event, who, value) in enumerate(events):
        peer = f"{who}".encode()
        session = sessions[peer]
        if event == "lease":
            most = max(each.room for each in sessions.values())
            taken = queue.take()
            assert (taken[1].room if taken else 0) == max(0, most)
            if taken:
                taken[1].leases.add(str(number))
                queue.note(*taken)
            continue
        if event == "answer" and session.leases:
            session.leases.pop()
        elif event == "capacity":
            session.capacity = value
        queue.note(peer, session)
