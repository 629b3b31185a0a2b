"""Channels over ZeroMQ: DEALER/ROUTER for control and a second pair for blobs.

Guarantee: a message is sent whole or `send` says False; nothing waits in a queue for a peer that is not there
(`IMMEDIATE`), no frame above `max_message_bytes` is accepted or sent, none is accepted of a kind that the other side does
not send, and an endpoint is served by one process at a time. With keys, every message of a producer came under the key of
the identity in its name and in its routing id; any other is refused. Nothing that a peer sends raises here: what cannot be
used is dropped whole and counted.
"""

import os
import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from protocol.errors import ConfigError, EndpointInUseError
from protocol.security.authenticator import ZAP_DOMAIN, Authenticator
from protocol.security.authorized_keys import AuthorizedKeys
from protocol.security.keys import ProducerKeys, TrainerKeys, identity_of
from protocol.security.rejections import Refusals
from protocol.transport.channel import BadFrame, PeerSchemas, TrainerSchema, received
from protocol.transport.connection_guard import HANDSHAKE_S, MONITORED, ConnectionGuard
from protocol.transport.handshake_watch import HandshakeWatch
from protocol.transport.ipc import check_path_length, in_use, lock_ipc
from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import BLOB_MESSAGES, Hello, Message, ProducerMessage, Reject, TrainerMessage

_BURST = 256  # frames taken from one socket before the other gets its turn
_SEND_HWM = 4096  # messages queued for one live peer before it counts as unreachable
_NOBLOCK, _PEER, _SRCFD = (
    int(zmq.NOBLOCK),
    int(zmq.NOBLOCK | zmq.SNDMORE),
    int(zmq.SRCFD),
)  # enums cost more than a send
_MAX_ROUTING_ID_BYTES = 255  # as ZMTP has it; libzmq takes longer ones, and every place that knows a peer keeps its own
_FAREWELL_MS = 2000  # for the last control messages, such as Bye, when a connection is closed


def _configure(socket: zmq.Socket[bytes], endpoint: str, max_message_bytes: int) -> None:
    check_path_length(endpoint)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),  # a peer whose host is gone does not keep its connection for ever
        (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 20),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, _SEND_HWM)


def _take(socket: "zmq.Socket[bytes]") -> tuple[bytes, int]:
    """The next frame, and of how many it is the first. The others are dropped."""
    frame, num_frames = socket.recv(_NOBLOCK), 1
    while socket.get(zmq.RCVMORE):
        socket.recv()
        num_frames += 1
    return frame, num_frames


def _read(frame: bytes, num_frames: int, kinds: Any, note_schema: Callable[[int], None]) -> Any:
    """The message in it, one of `kinds`, or what is wrong with it."""
    if num_frames > 1:
        return BadFrame(f"message of {num_frames} frames, expected 1", frame=frame)
    return received(frame, kinds, note_schema)


class _Sockets:
    """The two sockets, the wake-up descriptor and the poller that both ends share."""

    def __init__(self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int) -> None:
        self.endpoints = (control_endpoint, blob_endpoint)
        self.context = zmq.Context()
        self.max_message_bytes = max_message_bytes
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self.control: zmq.Socket[bytes] | None = None
        self.blob: zmq.Socket[bytes] | None = None

    def open(self, kind: int) -> list[tuple["zmq.Socket[bytes]", str]]:
        """Opens both sockets and returns them with their endpoints, not bound or connected yet."""
        self.control, self.blob = (self.context.socket(kind) for _ in range(2))
        opened = list(zip((self.control, self.blob), self.endpoints, strict=True))
        for socket, _ in opened:
            self._poller.register(socket, zmq.POLLIN)
        for socket, endpoint in opened:
            _configure(socket, endpoint, self.max_message_bytes)
        return opened

    def shut(self) -> None:
        for socket in (self.control, self.blob):
            if socket is not None:
                self._poller.unregister(socket)
                socket.close(linger=_FAREWELL_MS if socket is self.control else 0)
        self.control = self.blob = None

    def lane(self, message: Message) -> "zmq.Socket[bytes]":
        socket = self.blob if isinstance(message, BLOB_MESSAGES) else self.control
        assert socket is not None, "channel is closed"
        return socket

    def frame(self, message: Message, schema_version: int) -> bytes:
        frame = encode(message, schema_version=schema_version)
        if len(frame) > self.max_message_bytes:
            raise CodecError(
                f"{type(message).__name__} of {len(frame)} bytes is above transport.max_message_bytes="
                f"{self.max_message_bytes}"
            )
        return frame

    def wait(self, timeout_s: float) -> list["zmq.Socket[bytes]"]:
        """Waits for anything to arrive and returns the sockets that have something, control before blobs."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return [socket for socket in (self.control, self.blob) if socket is not None and socket in ready]

    def wake(self) -> None:
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """May be called twice. A later `wake` does nothing: its descriptor may belong to somebody else by then."""
        self.shut()
        self.context.term()
        with self._wake_lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake_fd)


class ZmqServer:
    """A `ServerChannel` bound to two endpoints.

    Args:
        keys: this trainer's, so that only authorized producers connect; None lets in everybody who reaches the endpoints.

    Raises:
        EndpointInUseError: another process serves one of the endpoints.
        ConfigError: an endpoint that cannot be bound on this machine.
    """

    def __init__(
        self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int, keys: TrainerKeys | None = None
    ) -> None:
        self.refusals = Refusals()
        self._sockets = _Sockets(control_endpoint, blob_endpoint, max_message_bytes)
        self._locks: list[int] = []
        self._schemas = PeerSchemas()
        self._monitors: list[zmq.Socket[bytes]] = []
        self._authorized = AuthorizedKeys(keys.authorized) if keys else None
        self._authenticator: Authenticator | None = None
        self._guard: ConnectionGuard | None = None
        try:
            if self._authorized is not None:
                self._authenticator = Authenticator(self._sockets.context, self._authorized, self.refusals)
                self._authenticator.start()
            self._bind(keys)
        except BaseException:
            self.close()
            raise

    def _bind(self, keys: TrainerKeys | None) -> None:
        opened = self._sockets.open(zmq.ROUTER)
        self._lanes = [socket for socket, _ in opened]
        for socket in self._lanes:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # Also without keys, when nobody answers for the domain: libzmq then refuses ZMTP 1 and 2, whose messages do not say
            # which connection they came over, and lets in everybody else.
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            if keys is not None:
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.reveal())
            self._monitors.append(socket.get_monitor_socket(MONITORED))
        self._guard = ConnectionGuard(
            self._monitors,
            self.refusals,
            self._sockets.max_message_bytes,
            self._authorized,
            self._authenticator,
            self._sockets.wake,
        )
        self._guard.start()
        for socket, endpoint in opened:
            lock = lock_ipc(endpoint)
            if lock is not None:
                self._locks.append(lock)
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    raise EndpointInUseError(in_use(endpoint)) from error
                raise ConfigError(f"transport.endpoint: cannot bind {endpoint}: {error}") from error

    def send(self, peer: bytes, message: Message) -> bool:
        try:
            frame = self._sockets.frame(message, self._schemas[peer])
            lane = self._sockets.lane(message)
            lane.send(peer, _PEER)
            lane.send(frame, _NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            self._schemas.forget(peer)
            return False
        return True

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | BadFrame]]:
        assert self._guard is not None
        self._guard.check()
        ready = self._sockets.wait(timeout_s)
        arrived: list[tuple[bytes, ProducerMessage | BadFrame]] = []
        for lane, socket in enumerate(self._lanes):
            for _ in range(_BURST if socket in ready else 0):
                try:
                    head = socket.recv(_NOBLOCK, copy=False)
                except zmq.Again:
                    self._guard.note_drained(lane)
                    break
                message = self._receive(lane, head, *_take(socket))
                if message is not None:
                    arrived.append((head.bytes, message))
            if socket not in ready:
                self._guard.note_drained(lane)
        return arrived

    def _receive(self, lane: int, head: zmq.Frame, frame: bytes, num_frames: int) -> ProducerMessage | BadFrame | None:
        """What has come under the routing id in `head`; None if it is refused."""
        assert self._guard is not None
        peer = head.bytes
        try:
            user = str(head.get("User-Id")).encode() if self._authorized is not None else b""
            self._guard.note_delivery(lane, int(head.get(_SRCFD)), user)
        except zmq.ZMQError:
            self.refusals("unreadable", "a message that does not say which connection it came over")
            return None
        if len(peer) > _MAX_ROUTING_ID_BYTES:
            self.refusals("unreadable", f"a message under a routing id of {len(peer)} bytes")
            return None
        message = _read(frame, num_frames, ProducerMessage, partial(self._schemas.note, peer))
        return message if self._authorized is None or self._may_say(peer, message, user) else None

    def _may_say(self, peer: bytes, message: ProducerMessage | BadFrame, user: bytes) -> bool:
        """Whether the key that a message came with is that of the name it came under."""
        assert self._authorized is not None
        identity = self._authorized.identity(user)
        if identity is None:
            self.refusals("revoked", "a message under a key that is not authorized any more")
            return False
        claimed = peer.decode(errors="replace").partition("/")[0]
        names = {claimed, message.producer} if isinstance(message, Hello) else {claimed}
        if {identity_of(name) for name in names} == {identity}:
            return True
        stolen = " and ".join(repr(name) for name in sorted(names))
        self.refusals("wrong_identity", f"a message of {identity}, which calls itself {stolen}")
        if isinstance(message, Hello):
            self.send(
                peer, Reject([f"this key is that of {identity}, and not of {stolen}: name it in transport.identity"])
            )
        return False

    def wake(self) -> None:
        self._sockets.wake()

    def close(self) -> None:
        """The guard goes on reading events until the sockets send none: they would wait for it."""
        if self._monitors:
            for socket in self._lanes:
                socket.disable_monitor()
        if self._guard is not None:
            self._guard.stop()
        while self._monitors:
            self._monitors.pop().close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._sockets.close()
        while self._locks:
            os.close(self._locks.pop())


class ZmqClient:
    """A `ClientChannel` connected to the two endpoints of a trainer, which need not be there yet.

    Args:
        keys: this producer's and the trainer's public one; None for a trainer without keys.

    Raises:
        ConfigError: an endpoint that nobody can connect to.
    """

    def __init__(
        self,
        name: str,
        control_endpoint: str,
        blob_endpoint: str,
        max_message_bytes: int,
        keys: ProducerKeys | None = None,
    ) -> None:
        self._name = name
        self._keys = keys
        self._watch = HandshakeWatch(control_endpoint, keys)
        self._sockets = _Sockets(control_endpoint, blob_endpoint, max_message_bytes)
        self._resets = 0
        try:
            self.reset()
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        self._watch.end()
        self._sockets.shut()
        self._resets += 1
        self._schema = TrainerSchema()
        # Nobody else can guess it and so keep this producer out: a ROUTER ignores who comes under an id in use.
        routing_id = f"{self._name}/{self._resets}/{secrets.token_hex(8)}".encode()
        opened = self._sockets.open(zmq.DEALER)
        for socket, _ in opened:
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.ROUTING_ID, routing_id)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if self._keys is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.trainer)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.secret.public())
                socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.reveal())
        self._watch.begin(opened[0][0])
        for socket, endpoint in opened:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                fix = "; give producers the trainer's address with --set transport.endpoint" if "*" in endpoint else ""
                raise ConfigError(f"transport.endpoint: cannot connect to {endpoint}: {error}{fix}") from error

    @property
    def schema_version(self) -> int:
        return self._schema.version

    def send(self, message: Message) -> bool:
        try:
            self._sockets.lane(message).send(self._sockets.frame(message, self._schema.version), _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]:
        if self._watch.must_reconnect():
            self.reset()
        arrived: list[TrainerMessage | BadFrame] = []
        for socket in self._sockets.wait(timeout_s):
            for _ in range(_BURST):
                try:
                    arrived.append(_read(*_take(socket), TrainerMessage, self._schema.note))
                except zmq.Again:
                    break
        return arrived

    def wake(self) -> None:
        self._sockets.wake()

    def close(self) -> None:
        self._watch.end()
        self._sockets.close()
