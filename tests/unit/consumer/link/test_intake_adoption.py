"""Leases of a trainer process that is gone: the next one adopts them, acknowledges those that are answered and refuses
what nobody wants any more. Another run's are none of its business."""

import pytest
from msgspec.structs import replace

from protocol.wire.messages import Ack, Lease, Nack, PolicyInfo, Welcome
from tests.unit.consumer.builders import live_buffer
from tests.unit.consumer.link.builders import BLOB, DIGEST, SHAPE, Start, Trainer, answer, only
from tests.unit.replay.builders import FillableJournal


def next_process(start: Start, journal: FillableJournal, session: str = "t") -> Trainer:
    replay = live_buffer(journal, session=session, groups_per_step=4)
    replay.restore(None, step=0, shape=SHAPE)
    return start(replay=replay)


def test_leases_of_an_older_process_are_adopted_and_their_groups_accepted(
    start: Start, journal: FillableJournal
) -> None:
    before = start(groups_per_step=4).producer(capacity=3)
    leases = before.leases
    trainer = next_process(start, journal)
    producer = trainer.producer(capacity=3, held=[lease.lease_id for lease in leases[:2]])
    assert trainer.replay.totals["adopted"] == 2
    assert producer.all(Nack) == producer.all(Ack) == []
    assert [lease.lease_id for lease in producer.leases] == ["0-2-0-1-t"], "adopted leases take room"
    assert trainer.replay.leased_to("p") == {"0-0-0-1-s", "0-1-0-1-s", "0-2-0-1-t"}
    ack = only(producer.say(answer(leases[0])), Ack)
    assert (ack.lease_id, ack.outcome) == ("0-0-0-1-s", "accepted")
    assert journal.query("SELECT lease_id FROM groups") == [("0-0-0-1-s",)]
    assert producer.leases[-1].lease_id == "0-3-0-1-t", "its room is free again"


def test_an_adopted_lease_has_the_whole_time_of_a_new_one(start: Start, journal: FillableJournal) -> None:
    [lease, *_] = start(groups_per_step=4).producer().leases
    trainer = next_process(start, journal)
    trainer.now = 5000.0
    producer = trainer.producer(capacity=0, held=[lease.lease_id])
    for _ in range(11):
        trainer.now += 5.0
        producer.beat(capacity=0, held=[lease.lease_id])
    assert trainer.replay.totals["failed_expired"] == 0
    trainer.now += 5.0
    producer.beat(capacity=0, held=[lease.lease_id])
    assert trainer.replay.totals["failed_expired"] == 1


def test_leases_that_the_older_process_answered_are_acknowledged_as_duplicates(
    start: Start, journal: FillableJournal
) -> None:
    older = start(groups_per_step=4).producer()
    answered, open_lease, *_ = older.leases
    older.say(answer(answered))  # and the acknowledgement is lost
    trainer = next_process(start, journal)
    producer = trainer.producer(capacity=0, held=[answered.lease_id, open_lease.lease_id])
    assert producer.all(Ack) == [Ack(answered.lease_id, "duplicate", PolicyInfo(0, DIGEST, len(BLOB)))]
    assert producer.all(Nack) == []
    assert isinstance(producer.inbox[0], Welcome), "before anything else"
    assert trainer.replay.leased_to("p") == {open_lease.lease_id}
    assert trainer.replay.totals["adopted"] == 1


def test_leases_that_nobody_wants_any_more_are_refused(start: Start, journal: FillableJournal) -> None:
    older = start(groups_per_step=4).producer()
    lease, *_ = older.leases
    trainer = next_process(start, journal)
    other = trainer.producer("other", capacity=1)
    assert other.leases[0].prompt_id == lease.prompt_id
    foreign = ["7-0-0-1-s", "0-5000-0-1-s", "not a lease"]
    producer = trainer.producer(capacity=1, held=[lease.lease_id, *foreign])
    words = "its prompt is not wanted any more"
    assert producer.all(Nack) == [Nack(name, "unknown_lease", words) for name in (lease.lease_id, *foreign)]
    assert trainer.replay.totals["adopted"] == 0
    assert trainer.replay.leased_to("p") == {only(producer.leases, Lease).lease_id}, "they take no room"
    assert only(other.say(answer(other.leases[0])), Ack).outcome == "accepted"


def test_groups_of_a_version_that_only_the_journal_knows_are_accepted_and_later_ones_refused(
    start: Start, journal: FillableJournal
) -> None:
    """The last process published more than the checkpoint that this one starts from."""
    journal.end_step(3)
    journal.note_policy(3, 3, "a" * 64)
    trainer = next_process(start, journal)
    producer = trainer.producer(capacity=2)
    first, second = producer.leases
    assert only(producer.say(answer(first, version=3)), Ack).outcome == "accepted"
    nack = only(producer.say(answer(second, version=4)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 4 was never published")
    assert journal.query("SELECT policy_version FROM groups") == [(3,)]


OTHER_RUN_S = ["1-5-0-1-old", "0-0-0-1-old"]
"""Leases of another run, of prompts and an epoch that this one has too."""


@pytest.mark.parametrize(("run_id", "adopted"), [("run", 2), ("another run", 0), ("", 0)])
def test_only_this_run_s_leases_are_adopted(start: Start, journal: FillableJournal, run_id: str, adopted: int) -> None:
    trainer = start(groups_per_step=4)
    fresh = trainer.replay.state()["ledger"]
    producer = trainer.producer(capacity=0, held=OTHER_RUN_S, run_id=run_id)
    assert trainer.replay.totals["adopted"] == adopted
    assert (trainer.replay.state()["ledger"] == fresh) is (adopted == 0), "else the cursor stands in the next epoch"
    assert [nack.lease_id for nack in producer.all(Nack)] == ([] if adopted else OTHER_RUN_S)


def test_a_group_of_another_run_is_not_judged(start: Start, journal: FillableJournal) -> None:
    """Its id names a prompt that this run leases, too."""
    trainer = start(groups_per_step=4)
    producer = trainer.producer(capacity=1, held=OTHER_RUN_S, run_id="another run")
    [ours] = producer.leases
    nack = only(producer.say(replace(answer(ours), lease_id="0-0-0-1-old")), Nack)
    assert (nack.lease_id, nack.reason, nack.detail) == ("0-0-0-1-old", "unknown_lease", "not a lease of this run")
    assert trainer.replay.leased_to("p") == {ours.lease_id}
    assert journal.query("SELECT count(*) FROM groups") == [(0,)]
    assert only(producer.say(answer(ours)), Ack).outcome == "accepted"


@pytest.mark.parametrize("run_id", ["", "another run"])
def test_a_lease_of_this_process_is_known_whatever_run_its_producer_names(start: Start, run_id: str) -> None:
    """Its greeting was under way when it learned of this run."""
    trainer = start(groups_per_step=4)
    [lease] = trainer.producer(capacity=1).leases
    trainer.now += 7.0
    trainer.tick()
    assert trainer.replay.leased_to("p") == set()
    producer = trainer.producer(capacity=0, held=[lease.lease_id], run_id=run_id)
    assert trainer.replay.leased_to("p") == {lease.lease_id}
    assert only(producer.say(answer(lease)), Ack).outcome == "accepted"
