"""Nothing that a peer sends ends the thread; its own end says goodbye and is raised in the main thread."""

import threading
import time
from typing import Any

import pytest

from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    BlobRequest,
    Bye,
    Heartbeat,
    Hello,
    Policy,
    PolicyInfo,
    Reject,
)
from tests.scripted import facts
from tests.unit.consumer.link.builders import BLOB, DIGEST, Producer, Start, answer, made_lease, only


def test_garbage_and_messages_of_the_wrong_side_are_counted_and_survived(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    producer = trainer.producer()
    good = encode(Heartbeat(0, 1, [], 0, 0.0))
    frames = [b"", b"SL", b"x" * 1000, good[:-1], good + b"\0", bytes([good[0] ^ 1]) + good[1:]]
    for frame in frames:
        producer.channel.send_frame(frame)
    trainer.tick()
    assert trainer.replay.totals["bad_frames"] == len(frames)
    producer.say(Reject(["you too"]), Policy(PolicyInfo(0, DIGEST, 1)), made_lease("s-1"))
    assert trainer.replay.totals["bad_frames"] == len(frames) + 3
    assert len([record for record in caplog.records if "refused a frame: " in record.getMessage()]) == 5
    assert only(producer.say(answer(producer.leases[0])), Ack).outcome == "accepted"


def test_a_message_whose_answer_cannot_be_sent_costs_itself_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    send = trainer.channel.send

    def bounded(peer: bytes, message: Any) -> bool:
        if isinstance(message, Reject) or (isinstance(message, BlobChunk) and len(message.data) > 100):
            raise CodecError(f"{type(message).__name__} is too large")
        return send(peer, message)

    trainer.channel.send = bounded
    stranger = Producer(trainer, trainer.channel.connect("stranger"), "stranger")
    assert stranger.hello(base_model_digest="a" * 64) == []
    assert "has no answer that can be sent: Reject is too large" in caplog.text
    requests = [BlobRequest(DIGEST, 0, length) for length in (2000, 100)]
    assert stranger.say(*requests) == [BlobMissing(DIGEST), BlobChunk(DIGEST, 0, BLOB[:100])]
    assert "(transport.blob_chunk_bytes): BlobChunk is too large" in caplog.text
    assert only(trainer.producer().say(Heartbeat(0, 1, [], 0, 0.0)), Policy).policy.version == 0


def test_who_comes_late_is_told_too_and_only_the_silent_are_not_waited_for(start: Start) -> None:
    trainer = start()
    slow, silent = trainer.producer("slow"), trainer.producer("silent")
    trainer.intake.start()
    ending = threading.Thread(target=trainer.intake.stop, args=("finished",))
    ending.start()
    late = Producer(trainer, trainer.channel.connect("late"), "late")
    for producer, word in ((late, Hello("late", facts(), 1)), (slow, Heartbeat(0, 1, [], 0, 0.0))):
        producer.inbox.clear()
        producer.channel.send(word)
        while Bye("finished") not in producer.all(Bye):
            time.sleep(0.01)
    trainer.now += 5.0
    slow.channel.send(Heartbeat(0, 1, [], 0, 0.0))
    while len(slow.all(Bye)) < 3:
        time.sleep(0.01)
    trainer.now += 5.0
    time.sleep(0.5)
    assert ending.is_alive(), "the slow one was heard 5 s ago"
    slow.channel.send(Bye("stopping"))
    ending.join(5)
    assert not ending.is_alive(), "the late one is not waited for"
    assert len(silent.all(Bye)) == 1


@pytest.mark.usefixtures("short_farewell")
def test_a_producer_that_does_not_answer_a_goodbye_holds_nobody_up(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    trainer.intake.start()
    trainer.intake.stop("stopping")
    assert not trainer.intake._thread.is_alive()
    assert producer.hear()[-1:] == [Bye("stopping")]
    trainer.errors.check()
