"""What cannot be used is kept for inspection with its reason, in bounds."""

from contextlib import closing

import msgspec

from protocol.wire.codec import encode
from protocol.wire.messages import Ack, Reject
from replay.journal.reader import JournalReader
from tests.unit.consumer.builders import FillableJournal
from tests.unit.consumer.intake.builders import Start, answer, made_lease, only


def quarantine(journal: FillableJournal) -> list[tuple[str, int]]:
    with closing(JournalReader(journal.path)) as reader:
        return [(frame.reason, frame.num_bytes) for frame in reader.refused_frames()]


def test_what_cannot_be_used_is_kept_for_inspection_with_its_reason(start: Start, journal: FillableJournal) -> None:
    trainer = start()
    producer = trainer.producer()
    lease = producer.leases[0]
    broken = msgspec.structs.replace(answer(lease), rewards=b"\0\0")
    producer.channel.send_frame(b"garbage")
    producer.say(broken, Reject(["you too"]))
    (bad, num_bytes), invalid, wrong_side = quarantine(journal)
    assert (bad != "", num_bytes) == (True, 7)
    reason = f"group {lease.lease_id} of p is invalid: rewards has 2 bytes, expected 4 x 4"
    assert invalid == (reason, len(encode(broken)))
    assert wrong_side == ("body refused: Invalid value 'reject' - at `$.type`", len(encode(Reject(["you too"]))))
    assert journal.query("SELECT frame FROM frames WHERE id = 1") == [(b"garbage",)]


def test_a_flood_of_garbage_is_counted_and_32_frames_a_tick_are_kept(start: Start, journal: FillableJournal) -> None:
    trainer = start()
    producer = trainer.producer()
    for number in range(100):
        producer.channel.send_frame(f"garbage {number}".encode())
    trainer.tick()
    assert trainer.replay.totals["bad_frames"] == 100
    assert len(quarantine(journal)) == 32
    producer.channel.send_frame(b"more")
    trainer.tick()
    assert quarantine(journal)[31:] == [
        ("frame starts with b'ga', not b'SL'", 10),
        ("frame of 4 bytes is shorter than the 8-byte prefix", 4),
    ]


def test_garbage_on_a_full_disk_is_kept_in_bounds_and_holds_no_group_up(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer(capacity=1)
    journal.full = True
    for _ in range(3):
        for _ in range(20):
            producer.channel.send_frame(b"garbage")
        trainer.tick()
    producer.say(answer(producer.leases[0]))
    journal.full = False
    trainer.tick()
    assert len(quarantine(journal)) == 32
    assert only(producer.all(Ack), Ack).outcome == "accepted"


def test_an_answer_to_an_evaluation_that_this_process_does_not_make_is_late_and_not_invalid(
    start: Start, journal: FillableJournal
) -> None:
    """The run went on without its `evaluation:`. The answer has another number of completions than a group of training."""
    trainer = start(groups_per_step=4)
    producer = trainer.producer(capacity=0)
    lease = made_lease("evaluation-3-0-1-before")
    late = answer(msgspec.structs.replace(lease, sampling=msgspec.structs.replace(lease.sampling, num_generations=1)))
    assert [(ack.lease_id, ack.outcome) for ack in producer.say(late)] == [("evaluation-3-0-1-before", "duplicate")]
    assert trainer.replay.totals["invalid"] == trainer.replay.totals["unknown_lease"] == 0
    assert journal.query("SELECT reason FROM frames") == []
