"""Leases go out by the room of producers and the staleness budget, and again when they expire or are lost."""

import time

import pytest

from protocol.wire.messages import Ack, Heartbeat, Hello, Nack, Policy, PolicyInfo
from tests.scripted import facts
from tests.unit.consumer.intake.builders import Prompts, Start, answer, made_lease, only


def test_a_full_producer_gets_one_lease_for_each_answer(start: Start) -> None:
    trainer = start(groups_per_step=9)
    producer = trainer.producer(capacity=2)
    assert len(producer.leases) == 2
    producer.say(answer(producer.leases[0]))
    assert len(producer.leases) == 3
    producer.say(Nack(producer.leases[1].lease_id, "generation_failed", "out of memory"))
    assert len(producer.leases) == 4


def test_leases_wait_for_the_staleness_budget(start: Start) -> None:
    trainer = start(groups_per_step=2, max_staleness=1)
    producer = trainer.producer()
    assert len(producer.leases) == 4
    producer.say(*[answer(lease) for lease in producer.leases])
    assert len(producer.leases) == 4
    assert trainer.replay.next_batch(0.0) is not None
    trainer.publish(1, b"next", "a" * 64)
    trainer.tick()
    assert [lease.policy_floor for lease in producer.leases[4:]] == [1, 1]


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


def test_an_expired_lease_goes_to_somebody_else(start: Start) -> None:
    trainer = start(groups_per_step=1)
    slow = trainer.producer("slow", capacity=1)
    fast = trainer.producer("fast", capacity=1)
    assert (len(slow.leases), len(fast.leases)) == (1, 0)
    for _ in range(12):
        trainer.now += 5
        slow.beat(capacity=0)  # alive, and wants nothing more
        fast.beat(capacity=1)
    assert trainer.replay.totals["failed_expired"] == 1
    assert [lease.prompt_id for lease in fast.leases] == [slow.leases[0].prompt_id] == [0]
    assert only(slow.say(answer(slow.leases[0])), Ack).outcome == "accepted"
    assert only(fast.say(answer(fast.leases[0])), Ack).outcome == "duplicate"


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


def test_leases_of_a_trainer_that_is_gone_take_no_room(start: Start) -> None:
    trainer = start(groups_per_step=4)
    producer = trainer.producer(capacity=2, held=["dead-1", "dead-2"])
    assert len(producer.leases) == 2


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


@pytest.mark.usefixtures("short_farewell")
def test_a_column_that_cannot_travel_is_a_bad_prompt(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prompts = Prompts()
    trainer = start(prompts=prompts)
    prompts.columns = {"image": object()}
    trainer.intake.start()  # every prompt fails, so there is no end of giving: it must still be possible to stop
    client = trainer.channel.connect("p")
    client.send(Hello("p", facts(), 8))
    deadline = time.monotonic() + 10
    while trainer.replay.totals["failed_bad_prompt"] < 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    trainer.intake.stop("stopping")
    assert time.monotonic() - began < 20
    assert "cannot encode Lease" in caplog.text
