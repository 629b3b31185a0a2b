"""Who asks gets the run's bundle, before it has said hello; who was started from another one is told before anything else."""

from consumer.link.offered_bundle import NO_BUNDLE, OfferedBundle
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobRequest,
    BundleOffer,
    BundleRequest,
    Hello,
    Reject,
    Welcome,
)
from slipstream_extras.bundle.bundle import digest_of
from tests.scripted import facts
from tests.unit.consumer.link.builders import BLOB, DIGEST, Producer, Start, only

DATA = b"a bundle"
OFFER = BundleOffer(digest_of(DATA), len(DATA), 4)
OFFERED = OfferedBundle(OFFER, DATA)


def test_it_is_given_to_a_stranger_in_chunks_beside_the_policies(start: Start) -> None:
    trainer = start(bundle=OFFERED)
    stranger = Producer(trainer, trainer.channel.connect("p"), "p")
    assert stranger.say(BundleRequest()) == [OFFER]
    assert stranger.say(BlobRequest(OFFER.digest, 4, 4)) == [BlobChunk(OFFER.digest, 4, b"ndle")]
    assert stranger.say(BlobRequest(DIGEST, 0, 4)) == [BlobChunk(DIGEST, 0, BLOB[:4])]
    assert stranger.say(BlobRequest("0" * 64, 0, 4)) == [BlobMissing("0" * 64)]
    assert trainer.intake.fleet.sessions == {}


def test_without_one_the_answer_says_why(start: Start) -> None:
    trainer = start()
    stranger = Producer(trainer, trainer.channel.connect("p"), "p")
    assert stranger.say(BundleRequest()) == [NO_BUNDLE.answer]


def test_a_producer_of_this_bundle_or_with_a_file_of_its_own_is_welcomed(start: Start) -> None:
    trainer = start(bundle=OFFERED)
    for name, bundle in (("p", OFFER.digest), ("q", "")):
        producer = Producer(trainer, trainer.channel.connect(name), name)
        assert only(producer.say(Hello(name, facts(), 8, bundle=bundle)), Welcome)


def test_a_producer_of_another_bundle_is_told_of_this_one_and_gets_no_lease(start: Start) -> None:
    """Also where it does not fit the run any more: its next start fits."""
    trainer = start(bundle=OFFERED)
    producer = Producer(trainer, trainer.channel.connect("p"), "p")
    assert producer.say(Hello("p", facts(max_loras=1), 8, ["0-0-0-1-s"], bundle="0" * 64)) == [OFFER]
    assert trainer.intake.fleet.sessions == {}
    assert producer.leases == []


def test_a_producer_of_a_bundle_meets_a_trainer_that_has_none(start: Start) -> None:
    trainer = start()
    producer = Producer(trainer, trainer.channel.connect("p"), "p")
    assert only(producer.say(Hello("p", facts(), 8, bundle="0" * 64)), Reject) == NO_BUNDLE.answer
