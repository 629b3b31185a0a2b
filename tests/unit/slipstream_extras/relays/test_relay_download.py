"""A relay may say what it likes: the download ends in time, and keeps nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.channel.channel import BadFrame
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobProgress,
    BlobRequest,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
)
from slipstream_extras.relays.relay_download import PATIENCE_S, RelayDownload, allowed_s

DIGEST, OTHER = "b" * 64, "a" * 64
DATA = b"0123456789"
RATE = 100.0  # bytes per second: a piece of 4 bytes may take 2.16 s, all of it 2.4 s


@pytest.fixture
def download() -> RelayDownload:
    return RelayDownload(PolicyInfo(2, DIGEST, len(DATA)), memoryview(bytearray(len(DATA))), 4, RATE, 0.0)


def test_it_asks_until_the_relay_has_the_policy_and_then_for_the_chunks(download: RelayDownload) -> None:
    assert download.due_requests(0.0) == [PolicyRequest(DIGEST)]
    assert download.due_requests(0.04) == []
    assert download.due_requests(0.05) == [PolicyRequest(DIGEST)]
    download.receive(BlobProgress(DIGEST, 4), 2.0)
    assert download.progress == 2, "for those who wait for this one"
    assert download.failure(2.39) is None, "it is on its way"
    download.receive(PolicyOffer(DIGEST), 2.39)
    assert download.failure(4.4) is None, "a new deadline"
    assert download.progress == 5
    assert download.due_requests(2.4) == [BlobRequest(DIGEST, *part) for part in ((0, 4), (4, 4), (8, 2))]
    for offset in (8, 0, 0, 4, 4):
        download.receive(BlobChunk(DIGEST, offset, DATA[offset : offset + 4]), 2.5)
    assert (download.is_complete, bytes(download.into), download.progress) == (True, DATA, 10)


@pytest.mark.parametrize(
    ("said", "now", "why"),
    [
        ([], 2.1, None),
        ([], 2.2, "silent"),
        ([BlobMissing(OTHER), PolicyOffer(OTHER), BlobChunk(DIGEST, 0, b"0123")], 0.1, None),
        ([BlobMissing(DIGEST)], 0.1, "missing"),
        ([BadFrame("it is none")], 0.1, "wrong"),
        ([PolicyOffer(DIGEST), PolicyOffer(DIGEST)], 2.2, "silent"),
        ([PolicyOffer(DIGEST), BlobChunk(DIGEST, 0, b"too long")], 2.2, "silent"),
        ([BlobProgress(DIGEST, 1)], 2.2, "silent"),
    ],
)
def test_why_it_is_left(download: RelayDownload, said: list[Any], now: float, why: str | None) -> None:
    download.due_requests(0.0)
    for message in said:
        download.receive(message, 0.0)
    assert download.failure(now) == why


messages = st.one_of(
    st.sampled_from([BlobMissing(OTHER), PolicyOffer(DIGEST), PolicyOffer(OTHER)]),
    st.builds(BlobProgress, st.just(DIGEST), st.integers(0, 20)),
    st.builds(BlobChunk, st.just(DIGEST), st.integers(0, 12), st.binary(max_size=5)),
)


@pytest.mark.long
@given(st.lists(st.tuples(st.floats(0.0, 1.0), messages), max_size=60))
def test_it_ends_in_time_and_keeps_only_the_announced_bytes(said: list[tuple[float, Any]]) -> None:
    download, now = RelayDownload(PolicyInfo(2, DIGEST, len(DATA)), memoryview(bytearray(len(DATA))), 4, RATE, 0.0), 0.0
    for after, message in said:
        now += after
        if download.is_complete or download.failure(now) is not None:
            break
        download.due_requests(now)
        download.receive(message, now)
    assert len(download.into) == len(DATA)
    assert download.progress <= len(DATA)
    latest = 2 * (allowed_s(len(DATA), RATE) + PATIENCE_S)
    assert download.is_complete or download.failure(latest) is not None
