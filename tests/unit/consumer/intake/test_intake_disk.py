"""No leases without room on the disk; groups are taken all the same."""

import logging
from types import SimpleNamespace

import pytest

from protocol.messages import Ack
from replay.disk import DiskGuard

from .builders import Start, answer


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
