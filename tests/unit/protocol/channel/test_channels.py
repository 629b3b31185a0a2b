"""The contract of `protocol.channel.channel`, kept by loopback, ipc and tcp alike."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from campaigns.fuzz.mutations import sealed
from protocol.channel.channel import BadFrame
from protocol.wire.codec import SCHEMA_VERSION, encode
from protocol.wire.messages import BlobChunk, BlobMissing, Heartbeat, Lease, Sampling
from tests.unit.protocol.channel_harness import (
    MESSAGE,
    Harness,
    eventually,
    introduce,
    introduce_blobs,
    numbered,
    receive,
)
from tests.unit.protocol.samples import SHA


@pytest.fixture(params=["loopback", "ipc", "tcp"])
def harness(request: pytest.FixtureRequest, short_dir: Path, stack: ExitStack) -> Harness:
    return Harness(request.param, short_dir, stack)


@pytest.fixture(params=["server", "client"])
def end(request: pytest.FixtureRequest, harness: Harness) -> Any:
    """Either end of a channel on which nothing arrives."""
    server = harness.server()
    client = harness.client(server)
    return server if request.param == "server" else client


def test_messages_arrive_whole_and_in_order_in_both_directions(harness: Harness) -> None:
    server, client, peer = harness.joined()
    sent = [numbered(number) for number in range(500)]
    assert all(client.send(message) for message in sent)
    assert receive(server, 500) == [(peer, message) for message in sent]
    assert all(server.send(peer, message) for message in sent)
    assert receive(client, 500) == sent


def test_peers_are_kept_apart(harness: Harness) -> None:
    server = harness.server()
    clients = [harness.client(server, name) for name in ("left", "right")]
    left, right = peers = [introduce(server, client) for client in clients]
    assert left != right
    for number, (client, peer) in enumerate(zip(clients, peers, strict=True)):
        assert client.send(numbered(number))
        assert receive(server, 1) == [(peer, numbered(number))]
        assert server.send(peer, numbered(10 + number))
    assert receive(clients[0], 1) == [numbered(10)]
    assert receive(clients[1], 1) == [numbered(11)]


def test_sending_to_an_unknown_peer_or_one_that_left_says_false(harness: Harness) -> None:
    server, client, peer = harness.joined()
    assert server.send(peer, MESSAGE) is True
    assert server.send(b"nobody", MESSAGE) is False
    assert server.send(b"", MESSAGE) is False
    assert server.send(b"nobody", BlobMissing(SHA)) is False
    client.close()
    eventually(lambda: not server.send(peer, MESSAGE), "the departure to show")


def test_reset_gives_a_new_routing_id_and_drops_what_was_queued(harness: Harness) -> None:
    server, client, old = harness.joined()
    assert introduce_blobs(server, client) == old
    for number in range(5):
        assert server.send(old, numbered(number))
    assert server.send(old, BlobMissing(SHA))
    time.sleep(0.05)
    client.reset()
    new = introduce(server, client)
    assert new != old
    eventually(lambda: not server.send(old, numbered(99)), "the old routing id to be forgotten")
    assert server.send(new, numbered(100))
    assert receive(client, 1) == [numbered(100)]
    assert client.poll(0.05) == []


def test_poll_returns_when_its_timeout_is_over(end: Any) -> None:
    for timeout_s in (0.0, 0.1):
        start = time.monotonic()
        assert end.poll(timeout_s) == []
        assert timeout_s - 0.01 <= time.monotonic() - start < timeout_s + 10.0


def test_wake_ends_a_poll_of_another_thread(end: Any) -> None:
    waker = threading.Timer(0.05, end.wake)
    waker.start()
    start = time.monotonic()
    assert end.poll(60.0) == []
    assert time.monotonic() - start < 30.0
    waker.join()


def test_a_wake_before_the_poll_is_remembered_once(end: Any) -> None:
    for _ in range(3):
        end.wake()
    start = time.monotonic()
    assert end.poll(60.0) == []
    assert time.monotonic() - start < 30.0
    start = time.monotonic()
    assert end.poll(0.1) == []
    assert time.monotonic() - start >= 0.09


def test_a_bad_frame_comes_out_with_its_reason_and_the_channel_goes_on(harness: Harness) -> None:
    server, client, peer = harness.joined()
    bad = [b"", b"GET / HTTP/1.1", encode(MESSAGE)[:-1], sealed(encode(MESSAGE)[8:], 9)]
    expected = [
        BadFrame("frame of 0 bytes is shorter than the 8-byte prefix"),
        BadFrame("frame starts with b'GE', not b'SL'"),
        BadFrame("checksum mismatch"),
        BadFrame(f"peer speaks protocol schema 9, this process speaks {SCHEMA_VERSION}", peer_schema=9),
    ]
    for frame in bad:
        harness.inject_to_server(client, frame)
        harness.inject_to_client(server, peer, frame)
    assert client.send(MESSAGE)
    assert server.send(peer, MESSAGE)
    assert receive(server, 5) == [(peer, item) for item in [*expected, MESSAGE]]
    assert receive(client, 5) == [*expected, MESSAGE]


def test_what_only_the_other_side_sends_is_a_bad_frame(harness: Harness) -> None:
    server, client, peer = harness.joined()
    lease = Lease("1.0", 1, 0, "1+1=", {}, Sampling(2, 8, 1.0), 0, 60.0)
    beat = Heartbeat(0, 1, [], 0, 0.0)
    assert client.send(lease)
    assert server.send(peer, beat)
    assert receive(server, 1) == [(peer, BadFrame("body refused: Invalid value 'lease' - at `$.type`"))]
    assert receive(client, 1) == [BadFrame("body refused: Invalid value 'heartbeat' - at `$.type`")]


def test_blobs_arrive_under_the_same_peer_and_control_does_not_wait_for_them(harness: Harness) -> None:
    server, client, peer = harness.joined()
    assert introduce_blobs(server, client) == peer
    chunks = [BlobChunk(SHA, index * 2**20, bytes([index]) * 2**20) for index in range(16)]
    assert all(server.send(peer, chunk) for chunk in chunks)
    assert server.send(peer, MESSAGE)
    arrived = receive(client, 17)
    assert [message for message in arrived if isinstance(message, BlobChunk)] == chunks
    assert MESSAGE in arrived


def test_closing_twice_is_harmless_and_so_is_a_late_wake(end: Any) -> None:
    end.close()
    end.wake()
    end.close()
