"""A blob arrives whole and once, whatever happens to its chunks."""

import random
import struct
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from producer.policies.download import BlobDownload, PolicyDownload
from protocol.wire.messages import LARGEST_POLICY_BYTES, BlobChunk, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest

DIGEST = "a" * 64


def download(data: bytes, chunk_bytes: int) -> BlobDownload:
    return BlobDownload(PolicyInfo(3, DIGEST, len(data)), chunk_bytes, 0.0)


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


def test_every_announced_policy_is_handed_over_once_unless_superseded():
    following = PolicyDownload(10)
    first, second = PolicyInfo(1, "a" * 64, 10), PolicyInfo(2, "b" * 64, 10)
    following.announce(first)
    assert following.due_requests(0.0) == [PolicyRequest("a" * 64)]
    following.announce(second)
    assert following.due_requests(0.0) == [PolicyRequest("b" * 64)]
    following.take_offer(PolicyOffer("a" * 64))
    assert following.due_requests(1.9) == [], "that is not the one"
    assert following.due_requests(2.0) == [PolicyRequest("b" * 64)], "the answer may be lost"
    following.take_offer(PolicyOffer("b" * 64, "", struct.pack("<2i", 5, 6), struct.pack("<f", -0.5)))
    assert following.due_requests(2.1) == [BlobRequest("b" * 64, 0, 10)]
    assert following.receive(BlobChunk("a" * 64, 0, bytes(10))) is None
    policy, blob, announced_at, probe, is_verified = following.receive(BlobChunk("b" * 64, 0, b"0123456789"))
    assert (policy, blob) == (second, b"0123456789")
    assert announced_at > 0
    assert (probe, is_verified) == (((5, 6), (-0.5,)), False)
    following.announce(second)
    assert following.due_requests(100.0) == []


def test_a_file_is_read_instead_of_chunks_and_chunks_when_it_cannot_be():
    policy, offer = PolicyInfo(1, "a" * 64, 10), PolicyOffer("a" * 64, "/dev/shm/slipstream-scratch-x/y")
    for content in (b"0123456789", None):
        following = PolicyDownload(10)
        following.announce(policy)
        following.due_requests(0.0)
        assert following.take_offer(offer) == policy
        assert following.take_offer(offer) is None, "the answer came twice"
        assert following.due_requests(100.0) == [], "it is being read"
        assert following.take_file("b" * 64, b"another") is None
        downloaded = following.take_file("a" * 64, content)
        if content is None:
            assert downloaded is None
            assert following.due_requests(100.0) == [BlobRequest("a" * 64, 0, 10)]
            downloaded = following.receive(BlobChunk("a" * 64, 0, b"0123456789"))
        assert (downloaded.blob, downloaded.is_verified) == (b"0123456789", content is not None)
        assert following.take_file("a" * 64, b"late") is None
        assert following.due_requests(200.0) == []


def test_a_file_that_a_newer_policy_overtook_is_dropped():
    following = PolicyDownload(10)
    following.announce(PolicyInfo(1, "a" * 64, 10))
    following.due_requests(0.0)
    following.take_offer(PolicyOffer("a" * 64, "/dev/shm/slipstream-scratch-x/y"))
    following.announce(PolicyInfo(2, "b" * 64, 10))
    assert following.take_file("a" * 64, b"0123456789") is None
    assert following.due_requests(0.0) == [PolicyRequest("b" * 64)]


def test_a_trainer_of_the_release_before_is_asked_for_chunks_at_once():
    following = PolicyDownload(10)
    following.announce(PolicyInfo(1, "a" * 64, 10))
    assert following.due_requests(0.0, knows_offers=False) == [BlobRequest("a" * 64, 0, 10)]
    downloaded = following.receive(BlobChunk("a" * 64, 0, b"0123456789"))
    assert (downloaded.blob, downloaded.probe) == (b"0123456789", None)


def test_a_policy_is_fetched_again_after_its_blob_was_missing_or_the_trainer_changed():
    following = PolicyDownload(10)
    policy = PolicyInfo(1, "a" * 64, 10)
    for forget in (lambda: following.give_up("a" * 64), following.forget_policy):
        following.announce(policy)
        following.give_up("b" * 64)
        assert len(following.due_requests(0.0)) == 1
        forget()
        assert following.due_requests(100.0) == []
        following.announce(policy)
        assert len(following.due_requests(0.0)) == 1
        forget()


def test_a_policy_that_does_not_fit_the_memory_is_refused_once_before_any_of_it_is_taken():
    room = 10**9
    following = PolicyDownload(1024, lambda: room)
    huge = PolicyInfo(1, "a" * 64, LARGEST_POLICY_BYTES)
    refusal = following.announce(huge)
    assert refusal == (
        f"it is {LARGEST_POLICY_BYTES} bytes large, and taking it needs twice that: this host has 1000000000 bytes of memory "
        "free. Give it more, or train a smaller adapter (lora.r)"
    )
    assert following.announce(huge) is None, "said once"
    assert following.due_requests(0.0) == []
    assert following.announce(PolicyInfo(2, "b" * 64, room // 2)) is None
    assert following.due_requests(0.0) == [PolicyRequest("b" * 64)]


def test_the_largest_download_takes_no_memory_before_its_bytes_do():
    tracemalloc.start()
    try:
        started = BlobDownload(PolicyInfo(3, DIGEST, LARGEST_POLICY_BYTES), 1024, 0.0)
        assert [request.offset for request in started.due_requests(0.0)] == [0, 1024, 2048, 3072]
        started.receive(BlobChunk(DIGEST, LARGEST_POLICY_BYTES - 1024, bytes(1024)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
