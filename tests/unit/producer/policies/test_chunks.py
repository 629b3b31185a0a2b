"""The bytes of a policy come whole and once, whatever happens to the messages."""

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from producer.policies.chunks import Chunks
from protocol.wire.messages import LARGEST_POLICY_BYTES, BlobChunk

DIGEST, OTHER = "b" * 64, "a" * 64


def asked(chunks: Chunks, now: float) -> list[tuple[int, int]]:
    return [(request.offset, request.length) for request in chunks.due_requests(now)]


def receive(chunks: Chunks, offset: int, data: bytes) -> bytes | None:
    return chunks.receive(BlobChunk(DIGEST, offset, data))


def test_requests_keep_a_window_and_are_repeated_when_unanswered_or_after_a_reconnect() -> None:
    chunks = Chunks(DIGEST, 115, 10)
    first = [(offset, 10) for offset in range(0, 80, 10)]
    assert asked(chunks, 0.0) == first
    assert asked(chunks, 1.9) == []
    assert asked(chunks, 2.0) == first, "nothing came"
    receive(chunks, 10, bytes(10))
    assert asked(chunks, 2.5) == [(80, 10)]
    chunks.forget_requests()
    assert asked(chunks, 2.5) == [(0, 10), *first[2:], (80, 10)]
    for offset in range(0, 90, 10):
        receive(chunks, offset, bytes(10))
    assert asked(chunks, 3.0) == [(90, 10), (100, 10), (110, 5)]
    assert chunks.num_arrived == 90


def test_where_chunks_come_slowly_a_request_is_repeated_later() -> None:
    chunks = Chunks(DIGEST, 200, 10)
    assert len(asked(chunks, 0.0)) == 8
    receive(chunks, 0, bytes(10))
    assert asked(chunks, 1.0) == [(80, 10)]
    assert asked(chunks, 15.9) == [], "a byte takes 0.1 s, and two windows of 80 bytes 16 s"
    assert asked(chunks, 16.0) == [(offset, 10) for offset in range(10, 80, 10)]


def test_chunks_of_another_blob_or_size_are_ignored() -> None:
    chunks = Chunks(DIGEST, 6, 4)
    assert chunks.receive(BlobChunk(OTHER, 0, b"abcd")) is None
    for offset, data in ((0, b"abc"), (2, b"cdef"), (4, b"ef")):
        assert receive(chunks, offset, data) is None
    assert receive(chunks, 0, b"abcd") == b"abcdef"


@given(data=st.binary(min_size=1, max_size=200), chunk_bytes=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_any_order_with_losses_and_repetitions_gives_the_blob_once(data: bytes, chunk_bytes: int, seed: int) -> None:
    chance, chunks, now = random.Random(seed), Chunks(DIGEST, len(data), chunk_bytes), 0.0
    blobs: list[bytes] = []
    while not blobs:
        now += 0.7
        requests = asked(chunks, now)
        chance.shuffle(requests)
        for offset, length in requests:
            for _ in range(chance.choice([0, 1, 2])):  # lost, or told twice
                blob = receive(chunks, offset, data[offset : offset + length])
                blobs += [] if blob is None else [blob]
    assert blobs == [data]


def test_the_largest_download_takes_no_memory_before_its_bytes_do() -> None:
    tracemalloc.start()
    try:
        chunks = Chunks(DIGEST, LARGEST_POLICY_BYTES, 1024)
        assert asked(chunks, 0.0) == [(offset, 1024) for offset in range(0, 8192, 1024)]
        receive(chunks, LARGEST_POLICY_BYTES - 1024, bytes(1024))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
