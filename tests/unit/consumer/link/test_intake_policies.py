"""A policy comes in chunks, from memory or from a file, for as long as somebody can ask for it."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from consumer.link import fleet
from protocol.errors import PolicyRefusedError
from protocol.runtime.scratch import shared_memory
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobRequest,
    Heartbeat,
    Nack,
    Policy,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
    Probe,
)
from tests.unit.consumer.link.builders import BLOB, DIGEST, Start


def test_a_blob_comes_in_chunks_and_one_that_is_gone_or_an_offset_behind_the_end_is_missing(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("p")
    for version in (1, 2):
        trainer.publish(version, b"next", str(version) * 64)
    for digest, offset in ((DIGEST, 0), ("2" * 64, 4), ("1" * 64, 0), ("1" * 64, 3)):
        client.send(BlobRequest(digest, offset, 3))
    trainer.tick()
    chunks = [BlobChunk("1" * 64, 0, b"nex"), BlobChunk("1" * 64, 3, b"t")]
    assert client.poll(0.0) == [BlobMissing(DIGEST), BlobMissing("2" * 64), *chunks]


PROBE = Probe(b"ids!ids!", 2, b"base", policy=b"logs")


def test_an_offer_has_the_probe_of_its_policy(start: Start) -> None:
    trainer = start()
    trainer.publish(1, b"next", "1" * 64, probe=PROBE)
    client = trainer.channel.connect("p")
    for digest in ("1" * 64, DIGEST, "2" * 64):
        client.send(PolicyRequest(digest))
    trainer.tick()
    plain, missing = PolicyOffer(DIGEST), BlobMissing("2" * 64)
    assert client.poll(0.0) == [PolicyOffer("1" * 64, "", PROBE), plain, missing]


def test_who_asks_for_a_policy_and_is_gone_before_the_answer_ends_nothing(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("p")
    send = trainer.channel.send
    trainer.channel.send = lambda peer, message: False
    client.send(PolicyRequest(DIGEST))
    trainer.tick()
    assert client.poll(0.0) == []
    trainer.channel.send = send
    client.send(PolicyRequest(DIGEST))
    trainer.tick()
    assert client.poll(0.0) == [PolicyOffer(DIGEST)]


def test_what_is_evaluated_is_announced_when_it_begins_and_ends_and_after_every_heartbeat(start: Start) -> None:
    evaluations = SimpleNamespace(policy=None, tick=lambda *_: [], release=lambda *_, **__: set())
    trainer = start(evaluations=evaluations)
    producer, policy = trainer.producer(capacity=4), PolicyInfo(0, DIGEST, len(BLOB))
    for evaluated in (policy, None):
        evaluations.policy = evaluated
        producer.hear()
        trainer.tick()
        trainer.tick()
        assert producer.hear() == [Policy(policy, evaluated)]
        assert producer.beat(capacity=4) == [Policy(policy, evaluated)]


def test_the_memory_of_a_policy_is_given_back_when_nobody_can_ask_for_it_any_more(start: Start) -> None:
    trainer = start()
    gone: list[int] = []
    for version in (1, 2, 3):
        trainer.publish(version, b"next", str(version) * 64, release=partial(gone.append, version))
    assert gone == [1], "two are kept"
    trainer.publish(4, b"next", "2" * 64, release=partial(gone.append, 4))
    assert gone == [1, 2], "the same weights again"


def test_a_policy_lies_in_a_file_where_there_is_room_and_chunks_come_out_of_it(start: Start, tmp_path: Path) -> None:
    given_back: list[int] = []
    with shared_memory(tmp_path) as memory:
        trainer = start(memory=memory)
        for version in (1, 2):
            trainer.publish(version, b"next", str(version) * 64, release=partial(given_back.append, version))
        client = trainer.channel.connect("p")
        for request in (PolicyRequest("1" * 64), BlobRequest("1" * 64, 1, 2), PolicyRequest(DIGEST)):
            client.send(request)
        trainer.tick()
        offer, chunk, gone = client.poll(0.0)
        assert Path(offer.shared_file).read_bytes() == b"next"
        assert chunk == BlobChunk("1" * 64, 1, b"ex")
        assert gone == BlobMissing(DIGEST)
        assert given_back == [1, 2], "a policy is in memory once"
        assert memory.folder is not None
        assert len(list(memory.folder.iterdir())) == 2, "those of policies that went are gone"


def test_a_refused_version_counts_once_for_each_producer_and_shows(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    for name in ("p", "q"):
        client = trainer.producer(name)
        beat = Heartbeat(0, 64, [], 0, 0.0, refused_version=1, refusal="not what the trainer computes")
        client.say(beat, beat)
        assert caplog.text.count(f"{name} refuses policy v1: not what the trainer computes") == 1
        assert f"{name} (policy v0, refuses v1: not what the trainer computes, heard" in trainer.intake.describe()
    assert trainer.replay.totals["swaps_refused"] == 2
    assert [each.heartbeat.refused_version for each in trainer.intake.fleet.sessions.values()] == [1, 1]
    client.say(Heartbeat(2, 64, [], 0, 0.0), Heartbeat(2, 64, [], 0, 0.0, refused_version=3, refusal="again"))
    assert trainer.replay.totals["swaps_refused"] == 3


def test_a_producer_gets_no_lease_whose_policy_it_will_never_serve_and_the_run_ends_without_another(
    start: Start,
) -> None:
    trainer = start(max_staleness=1)
    client = trainer.producer()
    assert len(client.leases) == 4, "two batches of two"
    trainer.publish(1, b"next", "1" * 64)
    trainer.tick()
    newer = [lease for lease in client.leases if lease.policy_floor == 1]
    assert len(newer) == 2
    held = [lease.lease_id for lease in client.leases]
    client.say(Heartbeat(0, 64, held, 0, 0.0, refused_version=1, refusal="the probe differs", num_refused=1))
    for lease in newer:
        client.say(Nack(lease.lease_id, "returned"))
    assert len(client.leases) == len(held), "they are not given to it again"
    client.say(Nack(held[0], "returned"))
    assert [lease.policy_floor for lease in client.leases[len(held) :]] == [0]
    trainer.intake.check_refused(oldest_usable=0)
    with pytest.raises(PolicyRefusedError, match=r"p, which serves v0, refuses v1: the probe differs"):
        trainer.intake.check_refused(oldest_usable=1)


def test_many_producers_are_told_in_turns_and_each_of_the_newest(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_TOLD_AT_ONCE", 2)
    trainer = start()
    producers = [trainer.producer(f"p{number}", capacity=0) for number in range(5)]
    for producer in producers:
        producer.hear()
        producer.inbox.clear()

    def told() -> list[list[int]]:
        return [[each.policy.version for each in producer.all(Policy)] for producer in producers]

    trainer.publish(1, BLOB, DIGEST)
    trainer.tick()
    assert told() == [[1], [1], [], [], []]
    trainer.publish(2, BLOB, DIGEST)
    for _ in range(3):
        trainer.tick()
    assert told() == [[1, 2], [1, 2], [2], [2], [2]]
    trainer.tick()
    assert told() == [[1, 2], [1, 2], [2], [2], [2]]
