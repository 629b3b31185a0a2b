"""No group is acknowledged before it is on the disk; what a full disk cannot take waits and is tried again."""

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.link.commit_queue import COMMIT_ROWS
from protocol.errors import JournalError
from protocol.wire.messages import Ack, Bye, Nack, PolicyInfo
from replay.journal.reader import JournalReader
from replay.journal.retention import DiskGuard
from tests.unit.consumer.link.builders import DIGEST, Start, Trainer, answer, only
from tests.unit.replay.builders import FillableJournal


class Disclosure:
    """What a second, read-only connection to the journal sees whenever an acknowledgement is sent."""

    def __init__(self, trainer: Trainer, path: Path) -> None:
        self._path = path
        self._send = trainer.channel.send
        self.seen: list[tuple[str, bool]] = []  # lease and whether its group was on the disk, for every Ack
        trainer.channel.send = self.send

    def send(self, peer: bytes, message: Any) -> bool:
        if isinstance(message, Ack):
            with closing(JournalReader(self._path)) as reader:
                self.seen.append((message.lease_id, reader.row(message.lease_id) is not None))
        return self._send(peer, message)


def test_no_group_is_acknowledged_before_it_is_in_the_journal(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=40)
    producer = trainer.producer(capacity=40)
    leases = producer.leases
    acknowledged = Disclosure(trainer, journal.path)
    producer.say(*[answer(lease, rewards=[float(i % 3)] * 3 + [0.0]) for i, lease in enumerate(leases)])
    assert acknowledged.seen == [(lease.lease_id, True) for lease in leases]
    assert {ack.outcome for ack in producer.all(Ack)} == {"accepted", "no_signal"}


def test_what_came_together_is_committed_together_but_no_more_than_32(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=80)
    producer = trainer.producer(capacity=80)
    assert COMMIT_ROWS == 32
    producer.say(*[answer(lease) for lease in producer.leases[:33]])
    assert journal.commits == [32, 1]
    producer.say(*[answer(lease) for lease in producer.leases[33:]])
    assert journal.commits == [32, 1, 32, 15]
    assert len(producer.all(Ack)) == 80


def test_no_group_waits_longer_than_5_ms_for_others(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=10)
    producer = trainer.producer(capacity=10)
    poll = trainer.channel.poll

    def slow(timeout_s: float) -> Iterator[Any]:
        for received in poll(timeout_s):
            trainer.now += 0.002  # as long as it takes to check a large group
            yield received

    trainer.channel.poll = slow
    producer.say(*[answer(lease) for lease in producer.leases])
    assert journal.commits == [4, 4, 2]


def test_on_a_full_disk_groups_wait_unacknowledged_and_are_tried_again_every_tick(
    start: Start, journal: FillableJournal, disk: DiskGuard, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(groups_per_step=3)
    producer = trainer.producer(capacity=3)
    groups = [answer(lease) for lease in producer.leases]
    reserve = journal.path.parent / "journal.reserve"
    assert reserve.exists()
    journal.full = True
    producer.say(*groups)
    assert producer.all(Ack) == []
    assert (trainer.replay.depth()["ready"], trainer.replay.depth()["leased"]) == (0, 3)
    assert not reserve.exists(), "given up, so that what is in progress can end"
    assert f"the disk of {journal.path} is full; " in caplog.text
    assert "; 3 groups wait in memory, the rest with producers" in caplog.text
    producer.say(*groups[:2])  # its patience with acknowledgements is over
    refused = journal.refused
    for _ in range(3):
        trainer.tick()
    assert journal.refused == refused + 3
    journal.full = False
    trainer.tick()
    assert [(ack.lease_id, ack.outcome) for ack in producer.all(Ack)] == [
        (group.lease_id, "accepted") for group in groups
    ]
    assert journal.commits == [3]
    assert trainer.replay.totals["duplicate"] == 0
    assert (trainer.replay.depth()["ready"], trainer.replay.depth()["leased"]) == (3, 0)


def test_a_group_that_waits_for_the_disk_is_answered_where_its_producer_is_now(
    start: Start, journal: FillableJournal
) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer(capacity=1)
    [lease] = producer.leases
    journal.full = True
    producer.say(answer(lease))
    producer.channel.reset()
    producer.hello(1, [lease.lease_id])
    producer.say(answer(lease))
    journal.full = False
    trainer.tick()
    assert only(producer.all(Ack), Ack) == Ack(lease.lease_id, "accepted", PolicyInfo(0, DIGEST, 2500))


@pytest.mark.long
def test_no_more_than_1024_groups_wait_in_memory(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=1030)
    producer = trainer.producer(capacity=1030)
    for _ in range(4):
        trainer.tick()
    groups = [answer(lease) for lease in producer.leases]
    assert len(groups) == 1030
    journal.full = True
    producer.say(*groups)
    assert journal.refused == 2, "once for the first 32, once at the end of the tick"
    journal.full = False
    trainer.tick()
    assert len(producer.all(Ack)) == sum(journal.commits) == 1024
    producer.say(*groups[1024:])  # its producer still has them
    assert len(producer.all(Ack)) == trainer.replay.totals["accepted"] == 1030


def test_groups_that_wait_for_the_disk_are_not_lost_with_their_producer(
    start: Start, journal: FillableJournal, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    answered, open_lease = producer.leases
    journal.full = True
    producer.say(answer(answered))
    trainer.now += 7.0
    trainer.tick()
    assert "producer p left (silent for 7.0 s); 1 prompts go out again" in caplog.text
    producer.hello(0)  # as a new process, which holds nothing
    for _ in range(3):
        producer.beat(capacity=0, held=[])
    journal.full = False
    trainer.tick()
    counts = trainer.replay.totals
    assert (counts["accepted"], counts["failed_released"], counts["leased"]) == (1, 1, 2)
    assert open_lease.lease_id not in trainer.replay.leased_to("p")
    assert "knows nothing of" not in caplog.text


def test_a_group_that_comes_with_a_goodbye_is_no_lost_lease(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start()
    producer = trainer.producer(capacity=2)
    producer.say(answer(producer.leases[0]), Bye("stopping"))
    assert trainer.replay.totals["accepted"] == 1
    assert trainer.replay.totals["failed_released"] == 1
    assert "1 prompts go out again" in caplog.text


def test_an_error_of_the_journal_ends_the_thread_and_is_raised_in_the_main_thread(
    start: Start, journal: FillableJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start()
    producer = trainer.producer()

    def damaged(entries: Any) -> None:
        raise JournalError(f"{journal.path} is damaged")

    monkeypatch.setattr(journal, "append", damaged)
    trainer.intake.start()
    producer.channel.send(answer(producer.leases[0]))
    trainer.intake._thread.join(10)
    assert not trainer.intake._thread.is_alive()
    assert trainer.channel.clients == {}, "the sockets are closed"
    with pytest.raises(JournalError, match="is damaged") as caught:
        trainer.errors.check()
    assert caught.value.exit_code == 74
    assert producer.all(Ack) == []
    trainer.publish(1, b"next", "a" * 64)  # the main thread may not have looked yet
    trainer.intake.wake()
    trainer.intake.stop("stopping")


# A disk without room for leases.


def test_no_leases_without_room_on_the_disk_and_again_when_there_is_room(
    start: Start, usage: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = start(groups_per_step=2)
    trainer.tick()
    usage.used, usage.free = 950, 50
    trainer.now += 1.0
    producer = trainer.producer(capacity=1)
    assert producer.leases == []
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
