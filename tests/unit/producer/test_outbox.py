"""A lease is begun once and answered once; its group stays until it is settled."""

from producer.outbox import Outbox
from protocol.messages import Group, Nack
from tests.scripted import made_up_group
from tests.scripted_trainer import lease


def group(number: int) -> Group:
    return made_up_group(lease(number), 0)


def ids(groups: list[Group]) -> list[str]:
    return [each.lease_id for each in groups]


def test_a_lease_is_begun_once_while_it_is_held():
    outbox = Outbox()
    assert outbox.begin("lease-1")
    assert not outbox.begin("lease-1")
    assert outbox.finish(group(1))
    assert not outbox.begin("lease-1")
    assert outbox.settle("lease-1")
    assert outbox.begin("lease-1")


def test_a_lease_is_answered_once():
    outbox = Outbox()
    outbox.begin("lease-1")
    outbox.begin("lease-2")
    assert outbox.finish(group(1))
    assert not outbox.finish(group(1))
    assert not outbox.finish(Nack("lease-1", "returned"))
    assert outbox.finish(Nack("lease-2", "returned"))
    assert not outbox.finish(group(3))
    assert outbox.held() == ["lease-1"]


def test_a_group_comes_due_until_it_is_settled():
    outbox = Outbox()
    for number in (2, 1):
        outbox.begin(f"lease-{number}")
    assert outbox.all_settled
    outbox.finish(group(2))
    assert outbox.held() == ["lease-1", "lease-2"]
    assert not outbox.all_settled
    assert ids(outbox.due(100.0)) == ["lease-2"]
    outbox.note_sent("lease-2", 100.0)
    assert outbox.due(114.9) == []
    assert ids(outbox.due(115.0)) == ["lease-2"]
    outbox.forget_sends()
    assert ids(outbox.due(100.1)) == ["lease-2"]
    assert outbox.settle("lease-2")
    assert not outbox.settle("lease-2")
    assert outbox.due(1000.0) == []
    assert outbox.held() == ["lease-1"]


def test_what_the_trainer_does_not_want_is_forgotten():
    outbox = Outbox()
    for number in (1, 2, 3):
        outbox.begin(f"lease-{number}")
    outbox.finish(group(3))
    assert outbox.abandon("lease-1")
    assert not outbox.abandon("lease-1")
    assert not outbox.abandon("lease-3"), "it is finished"
    assert outbox.void() == 2
    assert outbox.held() == []
    assert not outbox.finish(group(2))
