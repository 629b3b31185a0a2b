"""The trainer's policies arrive whole and once, from its file or in chunks, whatever happens to its messages."""

import random
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.interfaces import DownloadedPolicy
from producer.link.trainer_source import ChunkDownload, TrainerSource
from protocol.wire.messages import (
    LARGEST_POLICY_BYTES,
    BlobChunk,
    BlobMissing,
    BlobRequest,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
)

DIGEST = "a" * 64


def download(data: bytes, chunk_bytes: int) -> ChunkDownload:
    return ChunkDownload(PolicyInfo(3, DIGEST, len(data)), chunk_bytes)


def test_requests_keep_a_window_and_are_repeated_when_unanswered():
    started = download(bytes(100), 10)
    assert [(r.offset, r.length) for r in started.due_requests(0.0)] == [(0, 10), (10, 10), (20, 10), (30, 10)]
    assert started.due_requests(1.0) == []
    assert started.receive(BlobChunk(DIGEST, 10, bytes(10))) is None
    assert [r.offset for r in started.due_requests(1.0)] == [40]
    assert [r.offset for r in started.due_requests(2.5)] == [0, 20, 30]


def test_after_a_reconnect_only_what_is_missing_is_asked_for():
    started = download(bytes(35), 10)
    started.due_requests(0.0)
    started.receive(BlobChunk(DIGEST, 20, bytes(10)))
    started.forget_requests()
    assert [(r.offset, r.length) for r in started.due_requests(0.1)] == [(0, 10), (10, 10), (30, 5)]


def test_chunks_of_another_blob_or_size_are_ignored():
    started = download(b"abcdef", 4)
    assert started.receive(BlobChunk("b" * 64, 0, b"abcd")) is None
    assert started.receive(BlobChunk(DIGEST, 0, b"abc")) is None
    assert started.receive(BlobChunk(DIGEST, 2, b"cdef")) is None
    assert started.receive(BlobChunk(DIGEST, 4, b"ef")) is None
    assert started.receive(BlobChunk(DIGEST, 0, b"abcd")) == b"abcdef"


@given(data=st.binary(min_size=1, max_size=200), chunk_bytes=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_any_order_with_losses_and_repetitions_gives_the_blob_once(data, chunk_bytes, seed):
    chance = random.Random(seed)
    started = download(data, chunk_bytes)
    now, whole = 0.0, []
    while not whole:
        now += 0.7
        chunks = [BlobChunk(DIGEST, r.offset, data[r.offset : r.offset + r.length]) for r in started.due_requests(now)]
        chance.shuffle(chunks)
        for chunk in chunks:
            if chance.random() < 0.75:  # else lost
                whole += [blob for blob in [started.receive(chunk), started.receive(chunk)] if blob is not None]
    assert whole == [data]


def test_the_largest_download_takes_no_memory_before_its_bytes_do():
    tracemalloc.start()
    try:
        started = ChunkDownload(PolicyInfo(3, DIGEST, LARGEST_POLICY_BYTES), 1024)
        assert [request.offset for request in started.due_requests(0.0)] == [0, 1024, 2048, 3072]
        started.receive(BlobChunk(DIGEST, LARGEST_POLICY_BYTES - 1024, bytes(1024)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


class Setup:
    """A source that fetches `policy`."""

    policy = PolicyInfo(2, "b" * 64, 10)
    chunk = BlobChunk("b" * 64, 0, b"0123456789")

    def __init__(self) -> None:
        self.results: list[DownloadedPolicy | None] = []
        self.read = threading.Event()
        self.source = TrainerSource(10, lambda digest, content: self.read.set())
        self.source.fetch(self.policy, self.results.append)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_an_offer_is_asked_for_until_it_comes_and_then_the_chunks(setup):
    source = setup.source
    assert source.due_requests(0.0) == [PolicyRequest("b" * 64)]
    source.receive(PolicyOffer("a" * 64))
    assert source.due_requests(1.9) == [], "that is not the one"
    assert source.due_requests(2.0) == [PolicyRequest("b" * 64)], "the answer may be lost"
    source.forget_requests()
    assert source.due_requests(2.0) == [PolicyRequest("b" * 64)]
    source.receive(PolicyOffer("b" * 64, "", struct.pack("<2i", 5, 6), struct.pack("<f", -0.5)))
    assert source.due_requests(2.1) == [BlobRequest("b" * 64, 0, 10)]
    source.receive(BlobChunk("a" * 64, 0, bytes(10)))
    assert setup.results == []
    source.receive(setup.chunk)
    ((policy, blob, announced_at, probe, is_verified),) = setup.results
    assert (policy, blob) == (setup.policy, b"0123456789")
    assert announced_at > 0
    assert (probe, is_verified) == (((5, 6), (-0.5,)), False)
    assert source.due_requests(100.0) == []


def test_a_file_is_read_instead_of_chunks_and_chunks_when_it_cannot_be():
    for content in (b"0123456789", None):
        setup = Setup()
        source, offer = setup.source, PolicyOffer("b" * 64, "/dev/shm/slipstream-scratch-x/y")
        source.take_file("b" * 64, b"nobody reads it")
        for _ in range(2):  # the answer may come twice
            source.receive(offer)
        assert setup.read.wait(30)
        assert source.due_requests(100.0) == [], "it is being read"
        source.take_file("a" * 64, b"another")
        source.take_file("b" * 64, content)
        if content is None:
            assert setup.results == []
            assert source.due_requests(100.0) == [BlobRequest("b" * 64, 0, 10)]
            source.receive(setup.chunk)
        source.take_file("b" * 64, b"late")
        ((_, blob, _, _, is_verified),) = setup.results
        assert (blob, is_verified) == (b"0123456789", content is not None)
        assert source.due_requests(200.0) == []


def test_a_file_of_a_download_that_was_cancelled_is_dropped(setup):
    setup.source.receive(PolicyOffer("b" * 64, "/dev/shm/slipstream-scratch-x/y"))
    setup.source.cancel("b" * 64)
    setup.source.take_file("b" * 64, b"0123456789")
    setup.source.receive(setup.chunk)
    assert (setup.results, setup.source.due_requests(0.0)) == ([], [])


def test_a_trainer_of_the_release_before_is_asked_for_chunks_at_once(setup):
    assert setup.source.due_requests(0.0, knows_offers=False) == [BlobRequest("b" * 64, 0, 10)]
    setup.source.receive(setup.chunk)
    ((_, blob, _, probe, _),) = setup.results
    assert (blob, probe) == (b"0123456789", None)


def test_what_the_trainer_has_no_more_is_answered_with_none(setup):
    setup.source.receive(BlobMissing("a" * 64))
    assert len(setup.source.due_requests(0.0)) == 1
    setup.source.receive(BlobMissing("b" * 64))
    assert (setup.results, setup.source.due_requests(100.0)) == ([None], [])
