"""The trainer's policies arrive whole and once, from its file or in chunks, whatever happens to its messages."""

import random
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.interfaces import DownloadedPolicy
from producer.link.trainer_source import TrainerSource
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobRequest,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
)
from protocol.wire.policy_messages import LARGEST_POLICY_BYTES

DIGEST, OTHER = "b" * 64, "a" * 64
DATA = b"0123456789"
CHUNK = BlobChunk(DIGEST, 0, DATA)
FILE = PolicyOffer(DIGEST, "/dev/shm/slipstream-scratch-x/y")


class Setup:
    """A source that fetches a policy. With chunks alone it is as from a trainer of the release before, which makes no offers."""

    def __init__(self, num_bytes: int = 10, chunk_bytes: int = 10) -> None:
        self.results: list[DownloadedPolicy | None] = []
        self.read = threading.Event()
        self.source = TrainerSource(chunk_bytes, lambda work: self.read.set())
        self.source.fetch(PolicyInfo(2, DIGEST, num_bytes), self.results.append)

    def chunks(self, now: float) -> list[tuple[int, int]]:
        return [(r.offset, r.length) for r in self.source.due_requests(now, knows_offers=False)]  # type: ignore[union-attr]

    def receive(self, offset: int, data: bytes) -> None:
        self.source.receive(BlobChunk(DIGEST, offset, data))


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_requests_keep_a_window_and_are_repeated_when_unanswered_or_after_a_reconnect():
    setup = Setup(95)
    assert setup.chunks(0.0) == [(0, 10), (10, 10), (20, 10), (30, 10)]
    assert setup.chunks(1.0) == []
    setup.receive(10, bytes(10))
    assert setup.chunks(1.0) == [(40, 10)]
    assert setup.chunks(2.5) == [(0, 10), (20, 10), (30, 10)]
    setup.receive(20, bytes(10))
    setup.source.forget_requests()
    assert setup.chunks(2.5) == [(0, 10), (30, 10), (40, 10), (50, 10)]
    for offset in range(0, 80, 10):
        setup.receive(offset, bytes(10))
    assert setup.chunks(3.0) == [(80, 10), (90, 5)]


def test_chunks_of_another_blob_or_size_are_ignored():
    setup = Setup(6, 4)
    setup.source.receive(BlobChunk(OTHER, 0, b"abcd"))
    for offset, data in ((0, b"abc"), (2, b"cdef"), (4, b"ef")):
        setup.receive(offset, data)
    assert setup.results == []
    setup.receive(0, b"abcd")
    ((_, blob, _, probe, _),) = setup.results
    assert (blob, probe) == (b"abcdef", None)


@given(data=st.binary(min_size=1, max_size=200), chunk_bytes=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_any_order_with_losses_and_repetitions_gives_the_blob_once(data, chunk_bytes, seed):
    chance, setup, now = random.Random(seed), Setup(len(data), chunk_bytes), 0.0
    while not setup.results:
        now += 0.7
        chunks = setup.chunks(now)
        chance.shuffle(chunks)
        for offset, length in chunks:
            for _ in range(chance.choice([0, 1, 2])):  # lost, or told twice
                setup.receive(offset, data[offset : offset + length])
    assert [downloaded.blob for downloaded in setup.results] == [data]


def test_the_largest_download_takes_no_memory_before_its_bytes_do():
    tracemalloc.start()
    try:
        setup = Setup(LARGEST_POLICY_BYTES, 1024)
        assert setup.chunks(0.0) == [(0, 1024), (1024, 1024), (2048, 1024), (3072, 1024)]
        setup.receive(LARGEST_POLICY_BYTES - 1024, bytes(1024))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_offer_is_asked_for_until_it_comes_and_then_the_chunks(setup):
    source = setup.source
    assert source.due_requests(0.0) == [PolicyRequest(DIGEST)]
    source.receive(PolicyOffer(OTHER))
    assert source.due_requests(1.9) == [], "that is not the one"
    assert source.due_requests(2.0) == [PolicyRequest(DIGEST)], "the answer may be lost"
    source.forget_requests()
    assert source.due_requests(2.0) == [PolicyRequest(DIGEST)]
    source.receive(PolicyOffer(DIGEST, "", struct.pack("<2i", 5, 6), struct.pack("<f", -0.5)))
    assert source.due_requests(2.1) == [BlobRequest(DIGEST, 0, 10)]
    source.receive(CHUNK)
    ((policy, blob, announced_at, probe, is_verified),) = setup.results
    assert (policy.version, blob, probe, is_verified) == (2, DATA, ((5, 6), (-0.5,)), False)
    assert announced_at > 0
    assert source.due_requests(100.0) == []


@pytest.mark.parametrize("content", [DATA, None])
def test_a_file_is_read_instead_of_chunks_and_chunks_when_it_cannot_be(setup, content):
    source = setup.source
    source.take_file(DIGEST, b"nobody reads it")
    for _ in range(2):  # the answer may come twice
        source.receive(FILE)
    assert setup.read.wait(30)
    assert source.due_requests(100.0) == [], "it is being read"
    source.take_file(OTHER, b"another")
    source.take_file(DIGEST, content)
    if content is None:
        assert setup.results == []
        assert source.due_requests(100.0) == [BlobRequest(DIGEST, 0, 10)]
        source.receive(CHUNK)
    source.take_file(DIGEST, b"late")
    ((_, blob, _, _, is_verified),) = setup.results
    assert (blob, is_verified) == (DATA, content is not None)
    assert source.due_requests(200.0) == []


def test_what_was_cancelled_is_dropped_and_what_the_trainer_has_no_more_is_none(setup):
    setup.source.receive(BlobMissing(OTHER))
    setup.source.receive(FILE)
    setup.source.cancel(DIGEST)
    setup.source.take_file(DIGEST, DATA)
    setup.source.receive(CHUNK)
    assert (setup.results, setup.source.due_requests(0.0)) == ([], [])
    setup.source.fetch(PolicyInfo(2, DIGEST, 10), setup.results.append)
    setup.source.receive(BlobMissing(DIGEST))
    assert (setup.results, setup.source.due_requests(0.0)) == ([None], [])
