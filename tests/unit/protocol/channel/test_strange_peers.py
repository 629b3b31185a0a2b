"""Nothing that a peer sends, and no moment at which it leaves, ends a thread of the channels."""

import os
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from protocol.channel import channel
from protocol.channel.authenticator import ZAP_DOMAIN, Authenticator, Refusals
from protocol.channel.channel import BadFrame
from protocol.channel.connection_guard import ConnectionGuard
from protocol.wire import codec
from protocol.wire.codec import encode
from tests.unit.protocol.channel_harness import LIMIT, MESSAGE, Harness, eventually, introduce, receive

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
OLD_PEERS = {
    "ZMTP 1.0, its identity and a message": b"\x01\0" + b"\x05\0abcd",
    "ZMTP 1.0, a message of four parts": b"\x01\0" + b"\x05\1abcd" * 3 + b"\x05\0abcd",
    "ZMTP 2.0": _SIGNATURE + b"\x01\x05" + b"\0\0" + b"\0\4abcd",
    "ZMTP 2.0, a message of two parts": _SIGNATURE + b"\x01\x05" + b"\0\0" + b"\1\4abcd\0\4abcd",
}

every_old_peer = pytest.mark.parametrize("greeting", OLD_PEERS.values(), ids=OLD_PEERS)


@every_old_peer
def test_a_peer_of_an_old_zeromq_is_turned_away_and_counted(harness: Harness, greeting: bytes) -> None:
    """Its messages would not say which connection they came over, so nothing could bound what it sends."""
    server, client, peer = harness.joined()
    reason = "bad_handshake" if harness.transport == "tcp" else "oversized"

    def is_refused() -> bool:
        """One whose end comes before the guard has seen its beginning has no reason, or one that is less exact."""
        harness.connect().sendall(greeting)
        assert server.poll(0.05) == []
        return server.refusals.counts[reason] > 0

    eventually(is_refused, "the refusal")
    assert client.send(MESSAGE)
    assert receive(server, 1) == [(peer, MESSAGE)]


@every_old_peer
def test_a_message_that_does_not_say_where_it_comes_from_is_dropped_whole(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    """Were libzmq to let such a peer in, as it does where no ZAP domain is named."""
    set_option = zmq.Socket.setsockopt

    def without_domain(of: "zmq.Socket[bytes]", option: int, value: Any) -> None:
        if option != zmq.ZAP_DOMAIN:
            set_option(of, option, value)

    monkeypatch.setattr(zmq.Socket, "setsockopt", without_domain)
    server, client, peer = harness.joined()
    harness.connect().sendall(greeting)
    eventually(lambda: not server.poll(0.01) and server.refusals.counts["unreadable"], "the refusal")
    assert client.send(MESSAGE)
    assert receive(server, 1) == [(peer, MESSAGE)]
    assert server.refusals.counts.total() == 1


def test_a_message_that_nobody_foresaw_costs_itself_alone(ipc: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client, peer = ipc.joined()
    decode = codec.decode

    def surprised(frame: bytes, kinds: Any) -> Any:
        if frame == b"surprise":
            raise RuntimeError("not foreseen")
        return decode(frame, kinds)

    monkeypatch.setattr(channel, "decode", surprised)
    refused = BadFrame("a message that cannot be read: RuntimeError: not foreseen")
    client.sockets[0].send(b"surprise")
    server.sockets[0].send_multipart([peer, b"surprise"])
    assert client.send(MESSAGE)
    assert receive(server, 2) == [(peer, refused), (peer, MESSAGE)]
    assert receive(client, 1) == [refused]


@pytest.mark.parametrize("length", [255, 256, 300, 60_000])
def test_a_routing_id_longer_than_zeromq_has_them_is_refused(harness: Harness, length: int) -> None:
    """Every place that knows a peer keeps its routing id."""
    server = harness.server()
    name = bytes([length % 251 + 1]) * length
    body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + length.to_bytes(4, "big") + name
    frame = encode(MESSAGE)
    greeting = _SIGNATURE + b"\x03\0NULL" + bytes(48)
    stranger = harness.connect()
    stranger.sendall(greeting + b"\x06" + len(body).to_bytes(8, "big") + body)
    answer = b""
    while b"READY" not in answer:
        answer += stranger.recv(4096)
    stranger.sendall(bytes([0, len(frame)]) + frame)
    if length <= 255:
        assert receive(server, 1) == [(name, MESSAGE)]
        assert server.refusals.counts.total() == 0
    else:
        eventually(lambda: not server.poll(0.01) and server.refusals.counts["unreadable"] == 1, "the refusal")


@pytest.mark.long
def test_a_namesake_cannot_make_the_server_keep_what_it_sends(stack: ExitStack, short_dir: Path) -> None:
    """libzmq ignores it and keeps its bytes until the socket is closed."""
    harness = Harness("tcp", short_dir, stack)
    server = harness.server(limit=2**30)
    peer = introduce(server, harness.client(server, limit=2**30))
    with zmq.Context() as context, context.socket(zmq.DEALER) as namesake:
        namesake.linger = 0
        namesake.routing_id = peer
        namesake.reconnect_ivl = -1
        namesake.connect(harness.endpoints[0])
        for _ in range(64):
            namesake.send(bytes(2**20))
        eventually(lambda: not server.poll(0.01) and server.refusals.counts["multipart"], "its end")


def test_the_guard_goes_on_until_the_sockets_send_it_nothing_more(ipc: Harness) -> None:
    """libzmq's thread would wait for ever for a reader of what it reports."""
    guard, alive = ipc.server()._guard, []

    def watched(of: "zmq.Socket[bytes]") -> SimpleNamespace:
        return SimpleNamespace(disable_monitor=lambda: (alive.append(guard.is_alive()), of.disable_monitor()))

    guard._watched_sockets = [watched(of) for of in guard._watched_sockets]
    ipc.stack.close()
    assert alive == [True, True]
    assert not guard.is_alive()


# The guard reads of connections that may be gone, and their numbers be those of other things.


@pytest.fixture
def guard(stack: ExitStack) -> ConnectionGuard:
    """That is not started, so that the test is its thread."""
    made = ConnectionGuard([], Refusals(), LIMIT, None, None, lambda: None)
    stack.callback(made.stop)
    return made


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_connection_whose_number_names_a_file_by_then_costs_no_descriptor(
    guard: ConnectionGuard, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as file:
        before = open_descriptors()
        for _ in range(5):
            guard._begin((0, file.fileno()))
            guard._end((0, file.fileno()))
        assert open_descriptors() == before
    assert guard._connections == {}


@pytest.mark.parametrize("kind", ["udp", "listener", "unix datagrams"])
def test_a_connection_whose_number_names_another_socket_by_then_is_let_alone(
    guard: ConnectionGuard, stack: ExitStack, kind: str
) -> None:
    if kind == "listener":
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    else:
        family = socket.AF_INET if kind == "udp" else socket.AF_UNIX
        other = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
    before = open_descriptors()
    guard._begin((0, other.fileno()))
    assert guard._connections == {}
    guard._check()
    guard._end((0, other.fileno()))
    assert open_descriptors() == before


def test_who_spoke_and_left_has_not_spoken_for_who_got_its_number(guard: ConnectionGuard, stack: ExitStack) -> None:
    here, _there = (stack.enter_context(end) for end in socket.socketpair())
    key = (0, here.fileno())
    guard._begin(key)
    guard.deliveries.note(key, b"user", b"peer")
    first_messages = guard.deliveries.take_first_messages()
    guard._end(key)
    guard._begin(key)
    guard._note_first_messages(first_messages)
    guard._check()
    assert guard._quota._silent == {key: None}
    guard.deliveries.note(key, b"other", b"peer")
    guard._note_first_messages(guard.deliveries.take_first_messages())
    assert guard._quota._users == {key: b"other"}
    guard._end(key)


class Monitor:
    """Stand in for the monitor of a socket: say what is in `told`."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def poll(self, _: int) -> bool:
        return bool(self.told)

    def recv_multipart(self) -> list[bytes]:
        return [struct.pack("=Hi", *self.told.pop(0))]


@pytest.fixture
def monitor(guard: ConnectionGuard, monkeypatch: pytest.MonkeyPatch) -> Monitor:
    made = Monitor()
    monkeypatch.setattr(guard, "_monitors", [made])
    return made


@pytest.mark.parametrize("reads", [1, 2])
def test_who_got_the_number_of_one_that_left_is_not_taken_for_a_refused_one(
    guard: ConnectionGuard, monitor: Monitor, stack: ExitStack, reads: int
) -> None:
    """The guard reads of an accept and of its end at once, so the number may be that of another; after two reads it is not."""
    here, _there = (stack.enter_context(end) for end in socket.socketpair())
    before = open_descriptors()
    monitor.told = [(zmq.EVENT_ACCEPTED, here.fileno())]
    if reads == 2:
        guard._read_events()
    monitor.told += [(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0), (zmq.EVENT_DISCONNECTED, here.fileno())]
    guard._read_events()
    assert guard._refusals.counts.total() == reads - 1
    assert open_descriptors() == before


@pytest.mark.parametrize(("said", "reason"), [(b"", "handshake_timeout"), (b"GET /", "bad_handshake")])
def test_who_says_nothing_has_no_bad_handshake(
    guard: ConnectionGuard, monitor: Monitor, stack: ExitStack, said: bytes, reason: str
) -> None:
    """Even where the guard has learned late that it was there."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    peer = stack.enter_context(socket.create_connection(listener.getsockname()))
    here = stack.enter_context(listener.accept()[0])
    peer.sendall(said)
    monitor.told = [(zmq.EVENT_ACCEPTED, here.fileno())]
    guard._read_events()
    monitor.told = [(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0), (zmq.EVENT_DISCONNECTED, here.fileno())]
    guard._read_events()
    assert +guard._refusals.counts == {reason: 1}


def test_a_question_about_a_key_that_cannot_be_answered_is_a_refusal_and_the_next_one_is_answered(
    stack: ExitStack,
) -> None:
    class Broken:
        def refresh(self) -> None:
            raise RuntimeError("not foreseen")

    context = stack.enter_context(zmq.Context())
    refusals = Refusals()
    authenticator = Authenticator(context, Broken(), refusals)  # type: ignore[arg-type]
    stack.callback(authenticator.stop)
    authenticator.start()
    libzmq = stack.enter_context(context.socket(zmq.REQ))
    libzmq.linger = 0
    libzmq.connect("inproc://zeromq.zap.01")
    for _ in range(2):
        libzmq.send_multipart([b"1.0", b"1", ZAP_DOMAIN, b"127.0.0.1", b"", b"CURVE", bytes(32)])
        assert libzmq.poll(10_000)
        assert libzmq.recv_multipart()[2] == b"500"
    assert refusals.counts["unknown_key"] == 2
    assert authenticator.is_alive()
