"""What only sockets can suffer: raw peers, full queues, restarts."""

import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from protocol.channel.authenticator import REASONS, Refusals
from protocol.channel.channel import BadFrame
from protocol.channel.client import ZmqClient
from protocol.channel.connection_quota import ConnectionQuota, limits
from protocol.channel.server import ZmqServer
from protocol.errors import ConfigError
from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import BlobChunk, BlobMissing, Bye, Nack
from tests.unit.protocol.channel_harness import (
    LIMIT,
    MESSAGE,
    PATIENCE_S,
    Harness,
    eventually,
    introduce,
    introduce_blobs,
    keys_in,
    numbered,
    receive,
)
from tests.unit.protocol.samples import SHA


@pytest.mark.parametrize(
    ("trainer_has", "producer_has", "said"),
    [  # Which of the first two it is depends on who hangs up first.
        (False, True, r"has no keys, and this producer has: set transport\.keys|it has another key than \S+ \(.*\), or none"),
        (True, False, r"ends the handshake: it wants keys\. Set transport\.keys, as the trainer does, or give --keys"),
    ],
)  # fmt: skip
def test_keys_on_one_side_only_are_said(
    ipc: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture, trainer_has: bool, producer_has: bool, said: str
) -> None:
    of_trainer, of_producer = keys_in(tmp_path)
    server = ZmqServer(*ipc.endpoints, LIMIT, of_trainer if trainer_has else None)
    ipc.stack.callback(server.close)
    client = ZmqClient("gpu01-1-abcd", *ipc.endpoints, LIMIT, of_producer if producer_has else None)
    ipc.stack.callback(client.close)
    eventually(lambda: client.poll(0.01) or re.search(said, caplog.text), "the explanation")
    assert not client.send(MESSAGE)


def test_a_guard_that_fails_ends_its_server(ipc: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there are no bounds, so the trainer must not go on."""
    server = ipc.server()
    monkeypatch.setattr(server._guard, "_check", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: server.poll(0.05), "the error")
    server.close()


def test_who_sends_much_to_a_busy_server_is_not_taken_for_one_that_never_ends(tcp: Harness) -> None:
    server, client, _ = tcp.joined(limit=2**20)
    connections = server._guard._connections
    eventually(lambda: any(one.deliveries for one in list(connections.values())), "the guard to see the introduction")
    for _ in range(40):
        tcp.inject_to_server(client, bytes(500_000))
    suspect = eventually(
        lambda: [one for one in list(connections.values()) if one.over_since], "the guard's suspicion"
    )[0]
    eventually(lambda: time.monotonic() - suspect.over_since > 0.2, "some more checks")
    assert len(receive(server, 40)) == 40
    eventually(lambda: not server.poll(0.01) and not any(one.over_since for one in connections.values()), "its end")
    introduce(server, client)
    assert server.refusals.counts.total() == 0


def test_many_local_producers_that_start_together_are_all_let_in(ipc: Harness, stack: ExitStack) -> None:
    """Their connections for blobs stay silent until there is a policy, which over ipc looks like an unfinished handshake."""
    server = ipc.server()
    server._guard._limits = limits(1024)
    server._guard._quota = ConnectionQuota(limits(1024))
    context = stack.enter_context(zmq.Context(io_threads=1))
    for _ in range(72):
        stack.enter_context(context.socket(zmq.DEALER)).connect(ipc.endpoints[1])
    eventually(lambda: len(server._guard._connections) == 72, "all connections")
    eventually(lambda: not server._guard._watched, "a look at all of them")
    assert sum(server.refusals.counts.values()) == 0


def test_refusals_are_counted_all_and_logged_a_few(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    assert refusals.counts == dict.fromkeys(REASONS, 0)
    for number in range(100):
        refusals("no_key", f"peer {number}")
    refusals("multipart", "another")
    assert (refusals.counts["no_key"], refusals.counts["multipart"], refusals.counts.total()) == (100, 1, 101)
    assert [record.getMessage() for record in caplog.records] == [
        *(f"refused peer {number} (no_key, {number + 1} so far)" for number in range(3)),
        "refused another (multipart, 1 so far)",
    ]
    with pytest.raises(AssertionError):
        refusals("of_its_own", "a reason")


def test_a_client_that_started_first_finds_its_server(harness: Harness) -> None:
    client = ZmqClient("producer", *harness.endpoints, LIMIT)
    harness.stack.callback(client.close)
    assert [client.send(MESSAGE), client.send(BlobMissing(SHA))] == [False, False], "nobody listens"
    assert client.poll(0.1) == []
    server = harness.server()
    peer = introduce(server, client)
    assert introduce_blobs(server, client) == peer
    assert server.send(peer, MESSAGE)
    assert receive(client, 1) == [MESSAGE]


def test_a_client_outlives_its_server(harness: Harness) -> None:
    server, client, _ = harness.joined()
    server.close()
    eventually(lambda: not client.send(Bye("stopping")), "the server's end to show")
    assert client.poll(0.0) == []
    server = harness.server()
    peer = introduce(server, client)
    assert server.send(peer, MESSAGE)
    assert receive(client, 1) == [MESSAGE]


def test_the_limit_is_kept_by_the_sender(harness: Harness) -> None:
    """A frame that the receiver refuses would cut the connection, and redelivery would repeat that for ever."""
    server, client, peer = harness.joined(limit=65_536)
    largest = BlobChunk(
        SHA, 0, bytes(65_536 - len(encode(BlobChunk(SHA, 0, b""))) - 1)
    )  # whose length takes a byte more
    assert len(encode(largest)) == 65_536
    too_large = BlobChunk(SHA, 0, largest.data + b"x")
    assert introduce_blobs(server, client) == peer
    for send in (client.send, lambda message: server.send(peer, message)):
        with pytest.raises(CodecError) as caught:
            send(too_large)
        assert str(caught.value) == "BlobChunk of 65537 bytes is above transport.max_message_bytes=65536"
        assert send(largest)
    [(sender, chunk)] = receive(server, 1)  # whole, although producers send none
    assert (sender, chunk.frame) == (peer, encode(largest))
    assert receive(client, 1) == [largest]


def test_a_raw_peer_with_too_large_a_frame_is_dropped_and_others_do_not_notice(harness: Harness) -> None:
    server, client, peer = harness.joined(limit=65_536)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(harness.endpoints[0])
        raw.send(bytes(65_537))
        assert server.poll(0.1) == []
    assert client.send(MESSAGE)
    assert receive(server, 1) == [(peer, MESSAGE)]


def test_a_message_of_several_frames_is_a_bad_frame(harness: Harness) -> None:
    server, client, peer = harness.joined()
    client.sockets[0].send_multipart([b"one", b"two", b"three"])
    server.sockets[0].send_multipart([peer, b"one", b"two"])
    assert receive(server, 1) == [(peer, BadFrame("message of 3 frames, expected 1"))]
    assert receive(client, 1) == [BadFrame("message of 2 frames, expected 1")]
    assert client.send(MESSAGE)
    assert receive(server, 1) == [(peer, MESSAGE)]


def test_routing_ids_cannot_be_guessed(ipc: Harness) -> None:
    server = ipc.server()
    peers = [introduce(server, ipc.client(server, "twin")) for _ in range(2)]
    assert all(re.fullmatch(rb"twin/1/[0-9a-f]{16}", peer) for peer in peers)
    assert peers[0] != peers[1]


@pytest.mark.long
def test_a_full_blob_socket_says_false_and_leaves_control_alone(ipc: Harness) -> None:
    """A producer that stopped reading must not hold up the trainer, nor its adapters a lease."""
    server, client, peer = ipc.joined()
    assert introduce_blobs(server, client) == peer
    start = time.monotonic()
    sent = 0
    while server.send(peer, BlobChunk(SHA, sent, bytes(512))):
        sent += 1
        assert sent < 100_000
    assert time.monotonic() - start < 30.0
    assert sent >= 4096
    assert server.send(peer, MESSAGE)
    eventually(lambda: client.sockets[0].poll(0), "the lease, while no adapter byte is read")
    first = receive(client, 1)
    assert first[0] == MESSAGE, "control comes first"
    chunks = first[1:] + receive(client, sent - len(first) + 1)
    assert [chunk.offset for chunk in chunks] == list(range(sent))
    assert server.send(peer, BlobMissing(SHA))


@pytest.mark.long
def test_a_full_control_socket_says_false_instead_of_blocking(ipc: Harness) -> None:
    server, client, _ = ipc.joined()
    sent = 0
    while client.send(Nack(str(sent), "returned", "x" * 512)):
        sent += 1
        assert sent < 100_000
    arrived = receive(server, sent)
    assert [message.lease_id for _, message in arrived] == [str(number) for number in range(sent)]
    eventually(lambda: client.send(MESSAGE), "room in the queue")


def test_what_a_client_sent_before_close_still_arrives(harness: Harness) -> None:
    """A producer that stops delivers its last groups and its goodbye, then closes."""
    server, client, peer = harness.joined()
    for number in range(500):
        assert client.send(Nack(str(number), "returned", "x" * 2048))
    assert client.send(Bye("stopping"))
    client.close()
    assert receive(server, 501)[-1] == (peer, Bye("stopping"))


def test_one_poll_takes_a_bounded_burst_of_each_socket(ipc: Harness) -> None:
    server, client, peer = ipc.joined()
    introduce_blobs(server, client)
    for number in range(1000):
        assert server.send(peer, numbered(number))
        assert server.send(peer, BlobMissing(SHA))
    time.sleep(0.2)
    batch = client.poll(1.0)
    assert len(batch) <= 512
    is_blob = [isinstance(message, BlobMissing) for message in batch]
    assert is_blob == sorted(is_blob), "control before blobs"
    assert len(batch + receive(client, 2000 - len(batch))) == 2000


@pytest.mark.parametrize("with_keys", [False, True])
def test_channels_leak_no_descriptor(ipc: Harness, tmp_path: Path, with_keys: bool) -> None:
    keys = keys_in(tmp_path) if with_keys else (None, None)

    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        server = ZmqServer(*ipc.endpoints, LIMIT, keys[0])
        client = ZmqClient("gpu01-1-abcd", *ipc.endpoints, LIMIT, keys[1])
        introduce(server, client)
        client.reset()
        introduce(server, client)
        client.close()
        server.close()

    once()
    before = open_descriptors()
    for _ in range(5):
        once()
        with pytest.raises(ConfigError):
            ZmqServer("carrier-pigeon://coop", ipc.endpoints[1], LIMIT)
        with pytest.raises(ConfigError):
            ZmqClient("producer", "carrier-pigeon://coop", ipc.endpoints[1], LIMIT)
    assert open_descriptors() == before


def test_the_owner_learns_whose_connection_ended(harness: Harness) -> None:
    server = harness.server()
    client, other = harness.client(server, "killed"), harness.client(server, "other")
    peer, _ = introduce(server, client), introduce(server, other)
    assert server.disconnected() == []
    client.close()
    eventually(lambda: server.disconnected() == [peer] or server.poll(0.01), "the end of its connection")
    eventually(
        lambda: not server.send(peer, Bye("stopping")), "the end of its queue, which ZeroMQ drops a moment later"
    )
    assert server.disconnected() == []


def test_so_does_one_who_is_faster_than_the_guard(ipc: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a first message before the guard has read that there is a connection."""
    server = ipc.server()
    taken, read = threading.Event(), server._guard._read_events
    monkeypatch.setattr(server._guard, "_read_events", lambda: taken.wait(PATIENCE_S) and read())
    client = ipc.client(server)
    peer = introduce(server, client)
    taken.set()
    eventually(lambda: server._guard._connections, "a look at the connection")
    client.close()
    eventually(lambda: server.disconnected() == [peer] or server.poll(0.01), "the end of its connection")
