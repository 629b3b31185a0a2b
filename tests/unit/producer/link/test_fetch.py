"""Policies arrive once, for the newest and for evaluation, from the first source that has them, else from the trainer."""

import hashlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from producer.link.events import PolicyArrived, PolicyFetched, PolicyRefused
from producer.link.fetch import Fetcher
from producer.link.policy_source import Found, Room
from protocol.wire.messages import (
    LARGEST_POLICY_BYTES,
    BlobChunk,
    BlobMissing,
    BlobRequest,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
    Probe,
)
from tests.unit.producer.link.linked import TRANSPORT, Events

DATA = b"0123456789"
ROOM = 10**9
PATIENCE_S = 30.0


def policy(version: int, num_bytes: int = len(DATA)) -> PolicyInfo:
    return PolicyInfo(version, hashlib.sha256(b"%d" % version).hexdigest(), num_bytes)


class Sources:
    """Has nothing, or raises; and takes DATA alone for right."""

    transport = TRANSPORT

    def __init__(self) -> None:
        self.blob: bytes | None = None
        self.error: Exception | None = None
        self.searching, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.kept: list[str] = []
        self.claims: list[Any] = []
        self.released: list[Any] = []

    def find(self, policy: PolicyInfo, offer: PolicyOffer, cancelled: threading.Event) -> Found:
        self.searching.set()
        assert self.may_answer.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return Found(self.blob, self.unshared(policy))

    def keep(self, digest: str) -> None:
        self.kept.append(digest)

    def unshared(self, policy: PolicyInfo) -> Room:
        claim = Room()
        claim.release = lambda: self.released.append(claim)  # type: ignore[method-assign]
        self.claims.append(claim)
        return claim

    def take_from_trainer(self, policy: PolicyInfo, blob: memoryview, claim: Room, seconds: float) -> bool:
        assert seconds >= 0
        return blob == DATA


class Setup:
    """The link's thread, which is the test: `until` does what the downloads post, and the trainer has `blobs`."""

    def __init__(self) -> None:
        self.events, self.sources = Events(), Sources()
        self.posted: queue.Queue[Any] = queue.Queue()
        self.free = ROOM
        self.fetcher = Fetcher(self.sources, self.posted.put, self.events, lambda: self.free)  # type: ignore[arg-type]
        self.requests: list[Any] = []
        self.blobs: dict[str, bytes | None] = {}  # None: it says that it has none
        self.anchors: dict[str, PolicyInfo] = {}  # by the digest of what builds on it

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.requests
            try:
                posted = self.posted.get(timeout=0.01)
            except queue.Empty:
                continue
            if callable(posted):
                posted()
                continue
            self.requests.append(posted)
            if posted.digest in self.blobs:
                self.answer(posted, self.blobs[posted.digest])

    def answer(self, request: PolicyRequest | BlobRequest, blob: bytes | None) -> None:
        if blob is None:
            self.fetcher.receive(BlobMissing(request.digest))
        elif isinstance(request, PolicyRequest):
            probe = Probe(struct.pack("<2i", 5, 6), 2, struct.pack("<f", -0.5), policy=struct.pack("<f", -0.25))
            self.fetcher.receive(PolicyOffer(request.digest, "", probe, anchor=self.anchors.get(request.digest)))
        else:
            data = blob[request.offset : request.offset + request.length]
            self.fetcher.receive(BlobChunk(request.digest, request.offset, data))

    def offers_of(self, version: int) -> int:
        return self.requests.count(PolicyRequest(policy(version).digest))

    def has(self, *versions: int) -> None:
        self.blobs |= {policy(version).digest: DATA for version in versions}


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.fetcher.forget()


def test_every_announced_policy_is_handed_over_once_unless_superseded(setup: Setup) -> None:
    for version in (1, 2, 2):
        setup.fetcher.announce(policy(version))
    setup.has(1, 2)
    setup.until(lambda: setup.events.blobs)
    setup.fetcher.announce(policy(2))
    assert setup.events.blobs == [(2, DATA)]
    (arrived,) = setup.events.of(PolicyArrived)
    assert (arrived.probe.rows, arrived.probe.policy.tolist(), arrived.is_verified) == (((5, 6),), [-0.25], True)
    assert setup.sources.released == setup.sources.claims


def test_one_that_is_evaluated_is_fetched_beside_the_newest_and_again_when_it_is_requested_again(setup: Setup) -> None:
    setup.fetcher.announce(policy(2))
    for _ in range(2):
        setup.fetcher.request(policy(1))
    setup.fetcher.announce(policy(3))
    setup.has(1, 2, 3)
    setup.until(lambda: setup.events.fetches and setup.events.blobs)
    setup.blobs[policy(1).digest] = None
    setup.fetcher.request(policy(1))
    setup.until(lambda: len(setup.events.fetches) == 2)
    assert setup.events.fetches == [(1, DATA), (1, None)]
    assert setup.events.blobs == [(3, DATA)]


def test_what_serves_both_purposes_is_downloaded_once_and_cancelled_only_for_both(setup: Setup) -> None:
    setup.fetcher.announce(policy(1))
    same = PolicyInfo(7, policy(1).digest, len(DATA))  # another version with equal weights
    setup.fetcher.request(same)
    setup.has(1, 2)
    setup.until(lambda: setup.events.blobs)
    assert (setup.events.blobs, setup.events.fetches, setup.offers_of(1)) == ([(1, DATA)], [(7, DATA)], 1)
    setup.fetcher.announce(policy(2))
    setup.fetcher.request(policy(2))
    setup.fetcher.announce(policy(3))
    setup.until(lambda: len(setup.events.fetches) == 2)
    assert setup.events.fetches[1] == (2, DATA), "the other purpose goes on"
    assert len(setup.events.blobs) == 1


@pytest.mark.parametrize("happens", ["the trainer lacks it", "another trainer process"])
def test_an_announced_policy_is_fetched_again_when_it_is_announced_again_after(setup: Setup, happens: str) -> None:
    setup.fetcher.announce(policy(1))
    if happens == "the trainer lacks it":
        setup.blobs[policy(1).digest] = None
        setup.until(lambda: not setup.fetcher._downloads)
    else:
        setup.fetcher.forget()
    assert setup.events.blobs == []
    setup.has(1)
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)


def test_what_could_not_be_taken_is_downloaded_again_only_if_it_is_still_the_newest(setup: Setup) -> None:
    setup.has(1, 2)
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)
    setup.fetcher.announce(policy(2))
    setup.fetcher.forget_announcement(policy(1))
    setup.fetcher.announce(policy(2))
    setup.until(lambda: len(setup.events.blobs) == 2)
    setup.fetcher.forget_announcement(policy(2))
    setup.fetcher.announce(policy(2))
    setup.until(lambda: len(setup.events.blobs) == 3)
    assert setup.events.blobs == [(1, DATA), (2, DATA), (2, DATA)]


def test_a_policy_that_does_not_fit_the_memory_is_refused_once_before_any_of_it_is_taken(setup: Setup) -> None:
    huge = policy(1, LARGEST_POLICY_BYTES)
    for _ in range(2):
        setup.fetcher.announce(huge)
    ((refused, reason),) = setup.events.of(PolicyRefused)
    assert refused == huge
    assert "needs twice that" in reason
    assert "lora.r" in reason
    setup.fetcher.request(huge)
    assert setup.events.of(PolicyFetched) == [(huge, None)]
    setup.fetcher.announce(policy(2, ROOM // 2 + 1))
    assert len(setup.events.of(PolicyRefused)) == 2
    assert not setup.fetcher._downloads
    setup.fetcher.announce(policy(3, ROOM // 2))
    assert setup.fetcher._downloads


def test_a_lost_answer_is_requested_again_after_a_while_and_at_once_over_a_new_connection(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.link.fetch._REPEAT_AFTER_S", 0.05)
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.offers_of(1) >= 2)
    monkeypatch.setattr("producer.link.fetch._REPEAT_AFTER_S", 1e6)
    monkeypatch.setattr("producer.link.chunks._REPEAT_AFTER_S", 1e6)
    setup.fetcher.note_connection(True)
    count = setup.offers_of(1)
    setup.until(lambda: setup.offers_of(1) > count)
    setup.answer(PolicyRequest(policy(1).digest), DATA)
    chunk = BlobRequest(policy(1).digest, 0, len(DATA))
    setup.until(lambda: chunk in setup.requests)
    setup.fetcher.note_connection(True)
    setup.until(lambda: setup.requests.count(chunk) == 2)
    setup.answer(chunk, DATA)
    setup.until(lambda: setup.events.blobs)


def test_what_is_found_elsewhere_is_taken_and_no_chunk_is_requested(setup: Setup) -> None:
    setup.sources.blob = DATA
    setup.has(1)
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)
    assert not [request for request in setup.requests if isinstance(request, BlobRequest)]


def test_an_error_elsewhere_costs_only_that(setup: Setup) -> None:
    setup.sources.error = RuntimeError("a bug of a source")
    setup.has(1)
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)


def test_an_error_of_the_download_itself_ends_the_link(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.link.fetch.probe_of", lambda offer: 1 // 0)
    setup.has(1)
    setup.fetcher.announce(policy(1))
    with pytest.raises(ZeroDivisionError):
        setup.until(lambda: False)


def test_chunks_that_are_wrong_are_handed_over_unverified_for_the_loader_to_refuse(setup: Setup) -> None:
    setup.blobs[policy(1).digest] = DATA[::-1]
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)
    (arrived,) = setup.events.of(PolicyArrived)
    assert (arrived.blob, arrived.is_verified) == (DATA[::-1], False)


@pytest.mark.parametrize("end", ["cancelled", "cancelled in a search", "missing"])
def test_a_download_that_ends_early_gives_its_right_to_another_producer(setup: Setup, end: str) -> None:
    if end == "cancelled in a search":
        setup.sources.may_answer.clear()
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.offers_of(1))
    setup.answer(PolicyRequest(policy(1).digest), DATA)
    if end == "cancelled in a search":
        assert setup.sources.searching.wait(PATIENCE_S)
        setup.fetcher.forget()
        setup.sources.may_answer.set()
    else:
        setup.until(lambda: BlobRequest(policy(1).digest, 0, len(DATA)) in setup.requests)
        assert not setup.sources.released
        if end == "cancelled":
            setup.fetcher.forget()
        else:
            setup.fetcher.receive(BlobMissing(policy(1).digest))
    setup.until(lambda: setup.sources.claims and setup.sources.released == setup.sources.claims)
    assert setup.events.blobs == []


def test_more_answers_than_were_requested_take_no_memory(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.sources.may_answer.clear()
    setup.fetcher.announce(policy(1))
    for _ in range(1000):
        setup.fetcher.receive(BlobChunk(policy(1).digest, 0, DATA))
    (download,) = setup.fetcher._downloads.values()
    assert download._answers.qsize() <= 64
    setup.sources.may_answer.set()


def test_an_anchor_comes_before_the_policy_and_once_for_those_that_build_on_it(setup: Setup) -> None:
    setup.has(1, 2, 3, 9)
    setup.anchors = {policy(version).digest: policy(9) for version in (1, 2, 3)}
    for version in (1, 2):
        setup.fetcher.announce(policy(version))
        setup.until(lambda version=version: len(setup.events.blobs) == version)
    setup.fetcher.forget()  # another trainer process; the digest says what it is
    setup.fetcher.request(policy(3))
    setup.until(lambda: setup.events.fetches)
    arrived = setup.events.of(PolicyArrived)
    assert [downloaded.anchor for downloaded in arrived] == [(policy(9).digest, DATA)] * 2
    assert setup.offers_of(9) == 1
    of_policies = [request.digest for request in setup.requests if isinstance(request, BlobRequest)]
    assert of_policies == [policy(version).digest for version in (9, 1, 2, 3)]
    setup.has(4)
    setup.fetcher.announce(policy(4))
    setup.until(lambda: len(setup.events.blobs) == 3)
    assert setup.events.of(PolicyArrived)[-1].anchor is None
    assert setup.sources.released == setup.sources.claims


def test_a_newer_policy_does_not_end_the_download_of_an_anchor(setup: Setup) -> None:
    """A producer whose link is slow would begin anew with every version, and never have it."""
    setup.has(1, 2, 3)
    setup.anchors = {policy(version).digest: policy(9) for version in (1, 2, 3)}
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.offers_of(9))
    setup.answer(PolicyRequest(policy(9).digest), DATA)
    setup.until(lambda: BlobRequest(policy(9).digest, 0, len(DATA)) in setup.requests)
    for version in (2, 3):
        setup.fetcher.announce(policy(version))
    setup.answer(BlobRequest(policy(9).digest, 0, len(DATA)), DATA)
    setup.until(lambda: setup.events.blobs)
    setup.fetcher.announce(policy(3))
    setup.until(lambda: (3, DATA) in setup.events.blobs)
    assert (2, DATA) not in setup.events.blobs
    assert setup.offers_of(9) == 1


def test_the_newest_patch_is_the_anchor_of_those_after_it_and_does_not_come_again(setup: Setup) -> None:
    setup.fetcher.takes_patches = True
    setup.has(0, 1, 2, 3)
    setup.anchors = {policy(version).digest: policy(1) for version in (2, 3)}
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)
    setup.fetcher.request(policy(0))  # older ones are evaluated
    setup.until(lambda: setup.events.fetches)
    for version in (2, 3):
        setup.fetcher.announce(policy(version))
        setup.until(lambda version=version: len(setup.events.blobs) == version)
    arrived = setup.events.of(PolicyArrived)
    assert [downloaded.anchor for downloaded in arrived] == [None, *[(policy(1).digest, DATA)] * 2]
    of_policies = [request.digest for request in setup.requests if isinstance(request, BlobRequest)]
    assert of_policies == [policy(version).digest for version in (1, 0, 2, 3)]


def test_an_anchor_whose_sha256_is_wrong_is_handed_over_to_be_refused_and_fetched_again(setup: Setup) -> None:
    setup.has(1, 2)
    setup.anchors = {policy(version).digest: policy(9) for version in (1, 2)}
    setup.blobs[policy(9).digest] = wrong = DATA[::-1]
    setup.fetcher.announce(policy(1))
    setup.until(lambda: setup.events.blobs)
    setup.has(9)
    setup.fetcher.announce(policy(2))
    setup.until(lambda: len(setup.events.blobs) == 2)
    assert [bytes(each.anchor.data) for each in setup.events.of(PolicyArrived) if each.anchor] == [wrong, DATA]


def test_without_its_anchor_a_policy_is_not_to_be_had(setup: Setup) -> None:
    setup.has(1)
    setup.anchors[policy(1).digest] = policy(9)
    setup.blobs[policy(9).digest] = None
    setup.fetcher.announce(policy(1))
    setup.fetcher.request(policy(1))
    setup.until(lambda: setup.events.fetches)
    assert setup.events.fetches == [(1, None)]
    setup.has(9)
    setup.fetcher.announce(policy(1))  # which names a policy that exists by now
    setup.until(lambda: setup.events.blobs)


def test_an_anchor_that_does_not_fit_the_memory_is_refused_before_any_of_it_is_taken(setup: Setup) -> None:
    setup.has(1)
    setup.anchors[policy(1).digest] = policy(9, ROOM // 2)
    setup.fetcher.announce(policy(1))
    setup.fetcher.request(policy(1))
    setup.until(lambda: setup.events.fetches)
    ((refused, reason),) = setup.events.of(PolicyRefused)
    assert (refused, setup.events.fetches) == (policy(1), [(1, None)])
    assert str(ROOM // 2 + len(DATA)) in reason
    assert not [request for request in setup.requests if isinstance(request, BlobRequest)]
