"""A producer as last heard of: its room, its lost leases, and what it is doing, in words."""

from msgspec import structs

from consumer.link.sessions import ProducerSession
from protocol.wire.messages import Heartbeat


def beat(*held: str, capacity: int = 4) -> Heartbeat:
    return Heartbeat(7, capacity, list(held), 0, 0.0, waiting=1, generating=2, scoring=3, unacked=4)


class Session(ProducerSession):
    """Hears a heartbeat every two seconds."""

    def note(self, heartbeat: Heartbeat, interval_s: float = 2.0) -> set[str]:
        self.last_heard += 2.0
        return super().note(heartbeat, interval_s)


def session(*leases: str) -> Session:
    return Session("p", 4, 100.0, set(leases))


def test_the_room_is_the_capacity_that_it_said_last_without_its_leases() -> None:
    producer = session("a", "b", "c")
    assert producer.room == 1
    producer.note(beat("a", "b", "c", capacity=8))
    assert producer.room == 5
    producer.note(beat("a", "b", "c", capacity=0))
    assert producer.room == -3


def test_a_lease_is_lost_when_two_heartbeats_in_a_row_do_not_name_it() -> None:
    producer = session("a", "b")
    assert producer.note(beat("a")) == set()
    assert producer.note(beat("a")) == {"b"}
    assert producer.leases == {"a"}
    assert producer.note(beat("a")) == set(), "it is lost once"


def test_heartbeats_that_are_read_together_count_as_one() -> None:
    producer = ProducerSession("p", 4, 100.0, {"given after they were sent"})
    for _ in range(3):
        assert producer.note(beat(), 2.0) == set()
    producer.last_heard = 100.9
    assert producer.note(beat(), 2.0) == set()
    producer.last_heard = 101.0
    assert producer.note(beat(), 2.0) == {"given after they were sent"}


def test_a_lease_that_is_named_in_between_is_not_lost() -> None:
    producer = session("a", "b")
    for held in (("a",), ("a", "b"), ("b",), ("a",)):
        assert producer.note(beat(*held)) == set()
    assert producer.note(beat("a")) == {"b"}


def test_a_lease_that_was_answered_after_the_first_heartbeat_is_not_lost() -> None:
    producer = session("a", "b")
    producer.note(beat("a"))
    producer.leases.discard("b")
    assert producer.note(beat("a")) == set()


def test_a_lease_given_between_two_heartbeats_needs_two_more_to_be_lost() -> None:
    producer = session("a")
    producer.note(beat("a"))
    producer.leases.add("b")
    assert producer.note(beat("a")) == set()
    assert producer.note(beat("a")) == {"b"}


def test_leases_that_it_names_and_never_got_from_us_are_no_leases() -> None:
    producer = session("a")
    assert producer.note(beat("a", "of another trainer")) == set()
    assert producer.leases == {"a"}


def test_it_is_described_by_its_last_heartbeat() -> None:
    producer = session("a", "b")
    producer.evaluations.add("c")
    assert producer.describe(100.0) == "p (no heartbeat yet)"
    producer.note(beat("a", "b", "c"))
    work = "3 leases: 1 waiting, 2 generating, 3 scoring, 4 not acknowledged)"
    assert producer.describe(103.0) == f"p (policy v7, heard 1.0 s ago, {work}"
    producer.note(structs.replace(beat("a", "b", "c"), refused_version=0, refusal="it is damaged", asleep_in=0))
    what = "policy v7, refuses v0: it is damaged, asleep in the trainer's turn"
    assert producer.describe(104.5) == f"p ({what}, heard 0.5 s ago, {work}"
