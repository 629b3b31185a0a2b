"""The bytes of a policy come whole and once, whatever happens to the messages."""

import random
import tracemalloc

import psutil
from hypothesis import given
from hypothesis import strategies as st

from producer.link.chunks import Chunks
from protocol.wire.messages import LARGEST_POLICY_BYTES, BlobChunk
from slipstream_extras.relays.host_cache import Claim, HostCache

DIGEST, OTHER = "b" * 64, "a" * 64


def asked(chunks: Chunks, now: float) -> list[tuple[int, int]]:
    return [(request.offset, request.length) for request in chunks.due_requests(now)]


def of(num_bytes: int, chunk_bytes: int) -> Chunks:
    return Chunks(DIGEST, memoryview(bytearray(num_bytes)), chunk_bytes)


def receive(chunks: Chunks, offset: int, data: bytes) -> bool:
    return chunks.receive(BlobChunk(DIGEST, offset, data))


def test_requests_keep_a_window_and_are_repeated_when_unanswered_or_after_a_reconnect() -> None:
    chunks = of(115, 10)
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
    chunks = of(200, 10)
    assert len(asked(chunks, 0.0)) == 8
    receive(chunks, 0, bytes(10))
    assert asked(chunks, 1.0) == [(80, 10)]
    assert asked(chunks, 15.9) == [], "a byte takes 0.1 s, and two windows of 80 bytes 16 s"
    assert asked(chunks, 16.0) == [(offset, 10) for offset in range(10, 80, 10)]


def test_chunks_of_another_blob_or_size_are_ignored() -> None:
    chunks = of(6, 4)
    assert not chunks.receive(BlobChunk(OTHER, 0, b"abcd"))
    for offset, data in ((0, b"abc"), (2, b"cdef"), (4, b"ef")):
        receive(chunks, offset, data)
    assert (chunks.num_arrived, chunks.is_complete) == (2, False)
    assert receive(chunks, 0, b"abcd")
    assert (bytes(chunks.into), chunks.is_complete) == (b"abcdef", True)


@given(data=st.binary(min_size=1, max_size=200), chunk_bytes=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_any_order_with_losses_and_repetitions_gives_the_blob_once(data: bytes, chunk_bytes: int, seed: int) -> None:
    chance, chunks, now = random.Random(seed), of(len(data), chunk_bytes), 0.0
    completed = 0
    while not completed:
        now += 0.7
        requests = asked(chunks, now)
        chance.shuffle(requests)
        for offset, length in requests:
            for _ in range(chance.choice([0, 1, 2])):  # lost, or told twice
                completed += receive(chunks, offset, data[offset : offset + length])
    assert (completed, bytes(chunks.into)) == (1, data)


def test_the_largest_download_takes_no_memory_before_its_bytes_do() -> None:
    largest = min(LARGEST_POLICY_BYTES, psutil.virtual_memory().available // 2) // 1024 * 1024
    into = Claim(HostCache(None), DIGEST, None).room(largest)
    before = psutil.Process().memory_info().rss
    tracemalloc.start()
    try:
        chunks = Chunks(DIGEST, into, 1024)
        assert asked(chunks, 0.0) == [(offset, 1024) for offset in range(0, 8192, 1024)]
        receive(chunks, largest - 1024, bytes(1024))
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assert psutil.Process().memory_info().rss - before < 2**25
    finally:
        tracemalloc.stop()
