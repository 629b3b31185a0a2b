"""The handshake: who fits is welcomed and leased to; everybody else gets the reasons."""

import pytest

from campaigns.fuzz.mutations import sealed
from protocol.wire.codec import SCHEMA_VERSION, encode
from protocol.wire.messages import Bye, Group, Heartbeat, Hello, Lease, Nack, PolicyInfo, Reject, Welcome
from tests.scripted import facts
from tests.unit.consumer.link.builders import BLOB, DIGEST, SAMPLING, Producer, Start, only


def test_a_producer_that_fits_is_welcomed_and_leased_to(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    assert producer.all(Welcome) == [Welcome("run", "session", PolicyInfo(0, DIGEST, len(BLOB)), 1.0)]
    assert [lease.lease_id for lease in producer.leases] == ["0-0-0-1-s", "0-1-0-1-s"]
    assert producer.leases[0] == Lease("0-0-0-1-s", 0, 1, "0", {"answer": 1}, SAMPLING, 0, 60.0)
    assert len(trainer.intake.fleet.sessions) == 1


def test_a_producer_that_does_not_fit_gets_every_reason_with_its_fix(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    stranger = Producer(trainer, trainer.channel.connect("stranger"), "stranger")
    reject = only(stranger.hello(base_model_digest="a" * 64, max_loras=1), Reject)
    assert reject.problems == [
        "the producer serves another base model (aaaaaaaaaaaa) than the trainer trains (000000000000): give both the "
        "same model.path and model.revision",
        "the engine has 1 LoRA slots, max_staleness needs 3: restart the producer with the trainer's "
        "pipeline.max_staleness",
    ]
    assert len(trainer.intake.fleet.sessions) == 0
    assert stranger.leases == []
    assert "refused producer stranger: the producer serves another base model" in caplog.text


def test_another_release_is_told_so_and_counted(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("old")
    client.send_frame(sealed(encode(Hello("old", facts(), 1))[8:], 7))
    trainer.tick()
    [reject] = client.poll(0.0)
    assert reject == Reject(
        [f"peer speaks protocol schema 7, this process speaks {SCHEMA_VERSION}: install the same release on both sides"]
    )
    assert trainer.replay.totals["bad_frames"] == 1


def test_a_peer_that_never_said_hello_is_asked_to(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("ghost")
    for message in (
        Heartbeat(0, 1, [], 0, 0.0),
        Nack("s-1", "returned"),
        Group("s-1", 0, b"", b"", b"", b"", b"", b"", 0.0, 0.0),
    ):
        client.send(message)
        trainer.tick()
        assert client.poll(0.0) == [Bye("unknown_session")]
    client.send(Bye("stopping"))
    trainer.tick()
    assert client.poll(0.0) == [], "two that say goodbye to each other would never end"
    assert trainer.replay.totals["unknown_lease"] == 0
