"""No leases without room on the disk; groups are taken all the same."""

import logging
from types import SimpleNamespace

import pytest

from protocol.wire.messages import Ack, Nack
from replay.journal.disk import DiskGuard
from tests.unit.consumer.builders import FillableJournal
from tests.unit.consumer.intake.builders import Start, answer


@pytest.mark.parametrize("at_the_start", [False, True])
def test_no_leases_without_room_on_the_disk_and_again_when_there_is_room(
    start: Start, usage: SimpleNamespace, disk: DiskGuard, caplog: pytest.LogCaptureFixture, at_the_start: bool
) -> None:
    caplog.set_level(logging.INFO)
    trainer = start(groups_per_step=2)
    if not at_the_start:
        trainer.tick()
    usage.used, usage.free = 950, 50
    if at_the_start:
        disk.look()  # as its constructor does
    trainer.now += 1.0
    trainer.tick()
    producer = trainer.producer(capacity=1)
    assert producer.leases == []
    trainer.now += 1.0
    trainer.tick()
    usage.used, usage.free = 500, 500
    trainer.now += 0.5
    trainer.tick()
    assert producer.leases == [], "it looks once a second"
    trainer.now += 0.5
    trainer.tick()
    assert len(producer.leases) == 1
    assert [record.getMessage() for record in caplog.records if "full" in record.getMessage()] == [
        "the disk of run_dir is 95% full: no leases until there is room (replay.max_disk_used)",
        "the disk of run_dir is 50% full: leases are given again",
    ]


def test_without_room_for_leases_groups_are_still_taken(start: Start, usage: SimpleNamespace) -> None:
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    usage.free = 10
    trainer.now += 1.0
    producer.say(*[answer(lease) for lease in producer.leases])
    assert [ack.outcome for ack in producer.all(Ack)] == ["accepted", "accepted"]


def test_a_lease_that_cannot_end_on_a_full_disk_ends_when_there_is_room(start: Start, journal: FillableJournal) -> None:
    """Its producer forgot it with its answer; nobody waits for the lease's time-out, and the reason is not lost."""
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=1)
    first = producer.leases[0]
    journal.full = True
    producer.say(Nack(first.lease_id, "prompt_too_long", "9 tokens"))
    trainer.now += 0.2
    trainer.tick()
    assert first.lease_id in trainer.replay.leased_to("p")
    journal.full = False
    trainer.now += 0.2
    trainer.tick()
    assert first.lease_id not in trainer.replay.leased_to("p")
    assert journal.query("SELECT prompt_id, reason, detail FROM dead_letters") == [
        (first.prompt_id, "prompt_too_long", "9 tokens")
    ]
    trainer.now += 60.0
    trainer.tick()
    assert trainer.replay.totals["dead_letters"] == 1
