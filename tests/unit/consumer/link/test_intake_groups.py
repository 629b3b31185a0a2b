"""Every group and every failure is answered with its outcome; what is invalid is refused with the reason."""

from contextlib import closing

import msgspec
import numpy as np
import pytest

from protocol.wire.codec import decode, encode
from protocol.wire.messages import Ack, Group, MissingReward, Nack, Reject
from replay.journal.reader import JournalReader
from tests.unit.consumer.link.builders import BLOB, DIGEST, SHAPE, Start, answer, made_lease, only
from tests.unit.replay.builders import FillableJournal


def test_every_outcome_is_acknowledged(start: Start) -> None:
    trainer = start(groups_per_step=3)
    producer = trainer.producer()
    first, dull, _ = producer.leases
    assert only(producer.say(answer(first)), Ack).outcome == "accepted"
    assert only(producer.say(answer(first)), Ack).outcome == "duplicate"
    assert only(producer.say(answer(dull, rewards=[1.0] * 4)), Ack).outcome == "no_signal"


def test_an_invalid_group_is_refused_with_the_reason_and_its_prompt_goes_out_again(start: Start) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer()
    [lease] = producer.leases
    broken = msgspec.structs.replace(answer(lease), rewards=b"\0\0")
    assert only(producer.say(broken), Nack) == Nack(lease.lease_id, "invalid", "rewards has 2 bytes, expected 4 x 4")
    assert [(again.prompt_id, again.attempt) for again in producer.leases[1:]] == [(0, 2)]
    assert trainer.replay.totals["failed_invalid"] == 1


def test_the_versions_of_a_group_s_tokens_are_journaled_and_none_may_be_unpublished(
    start: Start, journal: FillableJournal
) -> None:
    trainer = start()
    trainer.publish(1, BLOB, DIGEST)
    producer = trainer.producer()
    first, second = (answer(lease) for lease in producer.leases[:2])

    def spanning(group: Group, newest: int) -> Group:
        versions = np.zeros(len(group.logprobs) // 4, "<i4")
        versions[-1] = newest
        return msgspec.structs.replace(group, token_versions=versions.tobytes())

    assert only(producer.say(spanning(first, 1)), Ack).outcome == "accepted"
    nack = only(producer.say(spanning(second, 2)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 2 was never published")
    [(frame,)] = journal.query("SELECT frame FROM bodies")
    kept = SHAPE.load(frame)
    assert (kept.policy_version, kept.newest_version, kept.versions.tolist()[-2:]) == (0, 1, [0, 1])


def test_why_rewards_are_missing_is_kept_beside_the_group(start: Start, journal: FillableJournal) -> None:
    producer = start().producer()
    missing = (MissingReward("exact", "timeout", "did not return within 5 seconds", (1,)),)
    group = msgspec.structs.replace(answer(producer.leases[0]), missing=missing)
    assert only(producer.say(group), Ack).outcome == "accepted"
    [(frame, kept)] = journal.query("SELECT frame, missing FROM bodies JOIN missing_rewards USING(seq)")
    assert decode(frame, Group) == msgspec.structs.replace(group, missing=())
    assert msgspec.msgpack.decode(kept, type=tuple[MissingReward, ...]) == missing
    assert only(producer.say(answer(producer.leases[1])), Ack)
    assert journal.query("SELECT count(*) FROM missing_rewards") == [(1,)]


def test_a_lease_of_another_trainer_is_unknown(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    assert only(producer.say(answer(made_lease("old-1"))), Nack) == Nack(
        "old-1", "unknown_lease", "not a lease of this run"
    )
    broken = msgspec.structs.replace(answer(made_lease("old-2")), rewards=b"")
    assert only(producer.say(broken), Nack).reason == "invalid"
    producer.say(Nack("old-3", "reward_failed", "boom"))
    assert trainer.replay.totals["unknown_lease"] == 1, "of groups alone"
    assert trainer.replay.totals["failed_reward_failed"] == 0
    assert trainer.replay.totals["failed_invalid"] == 0


def test_a_failure_is_logged_with_its_reason(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    producer = start().producer()
    producer.say(Nack(producer.leases[0].lease_id, "reward_failed", "KeyError: 'answer'"))
    assert "p could not answer a prompt: reward_failed: KeyError: 'answer'" in caplog.text


# What cannot be used is kept for inspection.


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
