"""The trainer's policies arrive once, from wherever they can be had, and in chunks where they cannot."""

import queue
import struct
from collections.abc import Callable
from typing import Any

import pytest

from producer.link.trainer_source import TrainerSource
from producer.policies.loader import DownloadedPolicy
from producer.relays.neighbours import Found
from protocol.wire.messages import BlobChunk, BlobMissing, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest

DIGEST, OTHER = "b" * 64, "a" * 64
DATA = b"0123456789"
CHUNK = BlobChunk(DIGEST, 0, DATA)
OFFER = PolicyOffer(DIGEST)
PATIENCE_S = 30.0


class Claim:
    def __init__(self) -> None:
        self.progress: list[int] = []
        self.released = False

    def note(self, num_bytes: int) -> None:
        self.progress.append(num_bytes)

    def release(self) -> None:
        self.released = True


class Elsewhere:
    """Has what the test says, when it says so."""

    def __init__(self) -> None:
        self.claim = Claim()
        self.answers: queue.Queue[bytes | Exception | None] = queue.Queue()
        self.cancelled: list[Any] = []
        self.taken: list[bytes] = []

    def find(self, policy: PolicyInfo, offer: PolicyOffer, cancelled: Any) -> Found:
        self.cancelled.append(cancelled)
        answer = self.answers.get(timeout=PATIENCE_S)
        if isinstance(answer, Exception):
            raise answer
        return Found(answer, self.claim)  # type: ignore[arg-type]

    def unshared(self, policy: PolicyInfo) -> Claim:
        return self.claim

    def take_from_trainer(self, policy: PolicyInfo, blob: bytes, claim: Claim, seconds: float) -> bool:
        assert seconds >= 0
        claim.release()
        self.taken.append(blob)
        return blob == DATA


class Setup:
    """A source that fetches a policy. What threads post is done by `do_next`, as the link's thread would."""

    def __init__(self) -> None:
        self.results: list[DownloadedPolicy | None] = []
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.elsewhere = Elsewhere()
        self.source = TrainerSource(10, self.posted.put, self.elsewhere)  # type: ignore[arg-type]
        self.fetch()

    def fetch(self) -> None:
        self.source.fetch(PolicyInfo(2, DIGEST, 10), self.results.append)

    def do_next(self) -> None:
        self.posted.get(timeout=PATIENCE_S)()

    def look_elsewhere(self, *answer: bytes | Exception | None) -> None:
        self.source.receive(OFFER)
        for each in answer:
            self.elsewhere.answers.put(each)
            self.do_next()


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_an_offer_is_asked_for_until_it_comes_and_then_the_chunks(setup: Setup) -> None:
    source = setup.source
    assert source.due_requests(0.0) == [PolicyRequest(DIGEST)]
    source.receive(PolicyOffer(OTHER))
    assert source.due_requests(1.9) == [], "that is not the one"
    assert source.due_requests(2.0) == [PolicyRequest(DIGEST)], "the answer may be lost"
    source.forget_requests()
    assert source.due_requests(2.0) == [PolicyRequest(DIGEST)]
    source.receive(PolicyOffer(DIGEST, "", struct.pack("<2i", 5, 6), struct.pack("<f", -0.5)))
    assert source.due_requests(2.1) == [], "others are asked first"
    setup.elsewhere.answers.put(None)
    setup.do_next()
    assert source.due_requests(2.1) == [BlobRequest(DIGEST, 0, 10)]
    source.receive(CHUNK)
    assert setup.elsewhere.claim.progress == [0, 10], "for those who wait"
    setup.do_next()
    ((policy, blob, announced_at, probe, is_verified),) = setup.results
    assert (policy.version, blob, probe, is_verified) == (2, DATA, ((5, 6), (-0.5,)), True)
    assert announced_at > 0
    assert source.due_requests(100.0) == []
    assert setup.elsewhere.claim.released


def test_what_is_found_elsewhere_is_taken_and_no_chunk_is_asked_for(setup: Setup) -> None:
    setup.look_elsewhere(DATA)
    setup.source.receive(OFFER)  # the answer may come twice
    setup.source.receive(CHUNK)
    ((_, blob, _, _, is_verified),) = setup.results
    assert (blob, is_verified) == (DATA, True)
    assert setup.source.due_requests(200.0) == []


def test_an_error_elsewhere_costs_only_that(setup: Setup) -> None:
    setup.look_elsewhere(RuntimeError("nobody foresaw this"))
    assert setup.source.due_requests(0.0) == [BlobRequest(DIGEST, 0, 10)]


def test_chunks_that_are_wrong_are_handed_over_unverified_for_the_loader_to_refuse(setup: Setup) -> None:
    setup.look_elsewhere(None)
    setup.source.receive(BlobChunk(DIGEST, 0, b"9876543210"))
    setup.do_next()
    ((_, blob, _, _, is_verified),) = setup.results
    assert (blob, is_verified) == (b"9876543210", False)


def test_what_was_cancelled_is_dropped_and_what_the_trainer_has_no_more_is_none(setup: Setup) -> None:
    source, claim = setup.source, setup.elsewhere.claim
    source.receive(BlobMissing(OTHER))
    source.receive(OFFER)
    source.cancel(DIGEST)
    setup.elsewhere.answers.put(DATA)
    setup.do_next()
    assert setup.elsewhere.cancelled[0].is_set()
    assert claim.released, "another producer of this host may download it"
    source.receive(CHUNK)
    assert (setup.results, source.due_requests(0.0)) == ([], [])
    setup.fetch()
    source.receive(BlobMissing(DIGEST))
    assert (setup.results, source.due_requests(0.0)) == ([None], [])


@pytest.mark.parametrize("end", ["cancelled", "missing"])
def test_a_download_that_ends_early_gives_its_right_to_another_producer(setup: Setup, end: str) -> None:
    setup.look_elsewhere(None)
    assert not setup.elsewhere.claim.released
    if end == "cancelled":
        setup.source.cancel(DIGEST)
    else:
        setup.source.receive(BlobMissing(DIGEST))
    assert setup.elsewhere.claim.released
