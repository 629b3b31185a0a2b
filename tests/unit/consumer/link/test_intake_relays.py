"""The trainer names relays to producers, and producers to relays, by what connected and not by what it says of itself."""

import pytest

from protocol.wire.adapter_blob import Anchor
from protocol.wire.codec import CodecError
from protocol.wire.messages import (
    BlobMissing,
    Heartbeat,
    Hello,
    Message,
    PolicyOffer,
    PolicyRequest,
    RelayAddress,
    RelayPeers,
)
from tests.scripted import facts
from tests.unit.consumer.link.builders import DIGEST, Producer, Start, Trainer

A, B = b"a" * 40, b"b" * 40


def join(trainer: Trainer, name: str, host: str, region: str = "eu", relay: str = "") -> Producer:
    producer = Producer(trainer, trainer.channel.connect(name), name)
    producer.say(Hello(name, facts(), 1, host=host, region=region))
    producer.say(beat(relay))
    return producer


def beat(relay: str) -> Heartbeat:
    return Heartbeat(0, 0, [], 0, 0.0, relay=relay)


def offered(trainer: Trainer, producer: Producer, digest: str = DIGEST) -> list[RelayAddress]:
    trainer.now += 0.2
    trainer.tick()
    [answer] = [each for each in producer.say(PolicyRequest(digest)) if isinstance(each, PolicyOffer | BlobMissing)]
    assert isinstance(answer, PolicyOffer)
    return answer.relays


@pytest.fixture
def trainer(start: Start) -> Trainer:
    return start()


def test_a_region_is_sent_to_its_first_relay_for_the_newest_policy_alone(trainer: Trainer) -> None:
    first = join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://127.0.0.1:5600")
    beside = join(trainer, "gpu1-2-aa", "gpu1")
    other = join(trainer, "gpu2-1-aa", "gpu2")
    elsewhere = join(trainer, "gpu3-1-aa", "gpu3", region="us")
    relay = [RelayAddress("tcp://127.0.0.1:5600")]
    assert [offered(trainer, each) for each in (first, beside, other, elsewhere)] == [[], [], relay, []]
    trainer.publish(1, b"next", "1" * 64)
    assert (offered(trainer, other), offered(trainer, other, "1" * 64)) == ([], relay), "older ones it need not have"
    first.say(beat(""))
    assert offered(trainer, other, "1" * 64) == [], "it does not relay any more"


def test_the_anchor_of_the_newest_policy_is_handed_on_too(trainer: Trainer) -> None:
    join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://127.0.0.1:5600")
    other = join(trainer, "gpu2-1-aa", "gpu2")
    trainer.publish(1, b"next", "1" * 64, anchor=Anchor("a" * 64, b"anchor"))
    assert offered(trainer, other, "a" * 64) == [RelayAddress("tcp://127.0.0.1:5600")]
    trainer.publish(2, b"last", "2" * 64)
    assert offered(trainer, other, "a" * 64) == [], "new producers do not need it"


def test_a_producer_that_has_just_joined_is_sent_to_a_relay_at_once(trainer: Trainer) -> None:
    relay = join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://127.0.0.1:5600")
    trainer.tick()
    other = join(trainer, "gpu2-1-aa", "gpu2")
    [offer] = [each for each in other.say(PolicyRequest(DIGEST)) if isinstance(each, PolicyOffer)]
    assert offer.relays == [RelayAddress("tcp://127.0.0.1:5600")]
    assert offered(trainer, relay) == []


@pytest.mark.parametrize("said", ["tcp://10.0.0.7:5600", "tcp://localhost.example:5600", ""])
def test_without_keys_only_a_relay_on_loopback_is_named(trainer: Trainer, said: str) -> None:
    join(trainer, "gpu1-1-aa", "gpu1", relay=said)
    assert offered(trainer, join(trainer, "gpu2-1-aa", "gpu2")) == []


def test_who_does_not_say_where_it_is_asks_the_trainer(trainer: Trainer) -> None:
    join(trainer, "gpu1-1-aa", "", relay="tcp://127.0.0.1:5600")
    assert offered(trainer, join(trainer, "gpu2-1-aa", "", region="")) == []


def told(producer: Producer) -> list[dict[str, str]]:
    return [{peer.identity: peer.key for peer in each.peers} for each in producer.all(RelayPeers)]


def test_a_relay_learns_who_may_connect_and_is_named_with_the_key_of_its_identity(trainer: Trainer) -> None:
    trainer.channel.keys = {"gpu1": A, "gpu2": B}
    other = join(trainer, "gpu2-1-aa", "gpu2")
    relay = join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://10.0.0.7:5600")
    assert offered(trainer, other) == [RelayAddress("tcp://10.0.0.7:5600", A.decode())]
    assert told(relay) == [{"gpu1": A.decode(), "gpu2": B.decode()}]
    assert told(other) == []
    trainer.channel.keys = {"gpu1": A}
    offered(trainer, other)
    assert told(relay)[1:] == [{"gpu1": A.decode()}], "a key was revoked"
    trainer.channel.keys = {"gpu2": B}
    assert offered(trainer, other) == [], "that of the relay"


def test_a_relay_that_cannot_be_told_is_not_named(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.channel.keys = {"gpu1": A, "gpu2": B}
    send = trainer.channel.send
    monkeypatch.setattr(
        trainer.channel, "send", lambda peer, message: not isinstance(message, RelayPeers) and send(peer, message)
    )
    join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://10.0.0.7:5600")
    assert offered(trainer, join(trainer, "gpu2-1-aa", "gpu2")) == []


def test_more_keys_than_fit_a_message_cost_the_relay_and_not_the_trainer(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.channel.keys = {"gpu1": A, "gpu2": B}
    send = trainer.channel.send

    def too_large(peer: bytes, message: Message) -> bool:
        if isinstance(message, RelayPeers):
            raise CodecError("RelayPeers of 70000 bytes is above transport.max_message_bytes=65536")
        return bool(send(peer, message))

    monkeypatch.setattr(trainer.channel, "send", too_large)
    join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://10.0.0.7:5600")
    assert offered(trainer, join(trainer, "gpu2-1-aa", "gpu2")) == []


def test_producers_of_the_trainers_host_have_nothing_to_hand_on(start: Start) -> None:
    trainer = start(place=("gpu1", "eu"))
    join(trainer, "gpu1-1-aa", "gpu1", relay="tcp://127.0.0.1:5600")
    assert offered(trainer, join(trainer, "gpu2-1-aa", "gpu2")) == []
    for number in range(3, 8):
        last = join(trainer, f"gpu{number}-1-aa", f"gpu{number}", relay=f"tcp://127.0.0.1:560{number}")
    assert offered(trainer, last) == [RelayAddress("tcp://127.0.0.1:5603")], "the trainer heads its own region"
