"""Leases go out by the room of producers and the staleness budget, and again when they expire or are lost."""

from protocol.wire.messages import Ack, Heartbeat, Nack, Policy, PolicyInfo
from tests.unit.consumer.link.builders import Start, answer, made_lease, only


def test_a_full_producer_gets_one_lease_for_each_answer(start: Start) -> None:
    trainer = start(groups_per_step=9)
    producer = trainer.producer(capacity=2)
    assert len(producer.leases) == 2
    producer.say(answer(producer.leases[0]))
    assert len(producer.leases) == 3
    producer.say(Nack(producer.leases[1].lease_id, "generation_failed", "out of memory"))
    assert len(producer.leases) == 4


def test_a_new_policy_is_announced_once_and_with_every_acknowledgement(start: Start) -> None:
    trainer = start(groups_per_step=4)
    producer = trainer.producer(capacity=4)
    producer.inbox.clear()
    trainer.publish(1, b"next", "a" * 64)
    trainer.tick()
    trainer.tick()
    new = PolicyInfo(1, "a" * 64, 4)
    assert producer.hear() == [Policy(new)]
    assert producer.beat(capacity=4) == [Policy(new)]
    assert only(producer.say(answer(made_lease("0-0-0-1-s"))), Ack) == Ack("0-0-0-1-s", "accepted", new)


def test_an_expired_lease_takes_no_room_any_more(start: Start) -> None:
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=1)
    for _ in range(12):
        trainer.now += 5
        producer.beat(capacity=1, held=[lease.lease_id for lease in producer.leases])
    assert [lease.lease_id for lease in producer.leases] == ["0-0-0-1-s", "0-0-0-2-s"]


def test_a_lease_that_is_handed_back_goes_out_again_and_is_no_failure(start: Start) -> None:
    trainer = start(groups_per_step=1)
    leaving = trainer.producer("leaving", capacity=1)
    leaving.say(Heartbeat(0, 0, [leaving.leases[0].lease_id], 0, 0.0))
    staying = trainer.producer("staying", capacity=1)
    leaving.say(Nack(leaving.leases[0].lease_id, "returned"))
    assert [lease.prompt_id for lease in staying.leases] == [0]
    assert (trainer.replay.totals["returned"], trainer.replay.totals["failed_returned"]) == (1, 0)


def test_a_lease_that_two_heartbeats_do_not_name_goes_out_again(start: Start) -> None:
    """It was lost on the way; its deadline may be an hour away."""
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    kept, _ = (lease.lease_id for lease in producer.leases)
    producer.beat(capacity=2, held=[kept])
    assert len(producer.leases) == 2, "a heartbeat may cross a lease that is on its way"
    trainer.now += 1.0
    producer.beat(capacity=2, held=[kept])
    assert [lease.prompt_id for lease in producer.leases] == [0, 1, 1]
    assert trainer.replay.totals["failed_released"] == 1
