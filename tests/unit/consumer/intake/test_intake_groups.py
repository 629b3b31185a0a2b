"""Every group and every failure is answered with its outcome; what is invalid is refused with the reason."""

import msgspec
import numpy as np
import pytest

from protocol.wire.messages import Ack, Group, Nack
from tests.unit.consumer.builders import FillableJournal
from tests.unit.consumer.intake.builders import BLOB, DIGEST, SHAPE, Start, answer, made_lease, only


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


def test_a_version_that_was_never_published_is_invalid(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    nack = only(producer.say(answer(producer.leases[0], version=1)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 1 was never published")


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


def test_an_endless_list_of_rewards_or_tokens_is_refused(start: Start) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer()
    for field in ("rewards", "completion_ids", "logprobs", "truncated", "completion_lengths"):
        [*_, lease] = producer.leases
        endless = msgspec.structs.replace(answer(lease), **{field: b"\0" * 4_000_000})
        assert f"{field} has 4000000 bytes" in only(producer.say(endless), Nack).detail


def test_a_failure_is_logged_with_its_reason_a_few_times(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start(groups_per_step=300)
    producer = trainer.producer(capacity=300)
    nacks = [Nack(lease.lease_id, "reward_failed", "KeyError: 'answer'") for lease in producer.leases[:251]]
    producer.say(*nacks[:250])
    trainer.now += 60.0
    producer.say(nacks[250])
    lines = [record.getMessage() for record in caplog.records if "KeyError" in record.getMessage()]
    assert len(lines) == 6
    assert lines[0] == "p could not answer a prompt: reward_failed: KeyError: 'answer'"
    assert lines[-1].endswith("(245 more of this kind were left out)")
