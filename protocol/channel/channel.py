"""The channel between trainer and producers, and the part of it that both ends share.

Guarantee: `poll` never blocks longer than its timeout and `send` never blocks. A frame that cannot be decoded is returned as a
`BadFrame` with the reason; it raises nothing. No frame above `max_message_bytes` is accepted or sent, and a message of several
frames is dropped whole. One thread owns a channel and calls all of its methods; any thread may call `wake`, which makes a running
`poll` return early.
"""

import contextlib
import fcntl
import os
import socket as system_sockets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import zmq

from protocol.channel.connection_guard import HANDSHAKE_S
from protocol.channel.keys import SecretKey
from protocol.errors import ConfigError, SlipstreamError, cannot_listen
from protocol.runtime.scratch import private
from protocol.wire.codec import CodecError, SchemaMismatchError, decode, encode
from protocol.wire.messages import BLOB_MESSAGES, Group, Message, ProducerMessage, TrainerMessage


@dataclass(frozen=True)
class BadFrame:
    """A frame that was refused. `peer_schema` is set when the peer runs another release. `frame` is the content."""

    reason: str
    peer_schema: int | None = None
    frame: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class ReceivedGroup:
    """A group, and the frame that it came in, which the journal keeps."""

    message: Group
    frame: bytes = field(repr=False)


def received(frame: bytes | memoryview, kinds: Any) -> Any:
    """Return the message in `frame`, one of `kinds`, with the frame if it is a group; or a `BadFrame` that says what is wrong."""
    try:
        message = decode(frame, kinds)
        return ReceivedGroup(message, bytes(frame)) if isinstance(message, Group) else message
    except SchemaMismatchError as error:
        return BadFrame(str(error), error.peer_version, bytes(frame))
    except CodecError as error:
        return BadFrame(str(error), frame=bytes(frame))
    except Exception as error:  # an unforeseen error costs one message
        return BadFrame(f"a message that cannot be read: {type(error).__name__}: {error}", frame=bytes(frame))


class ServerChannel(Protocol):
    """The trainer's end: many peers, each named by an opaque routing id."""

    def authorized(self) -> dict[str, bytes] | None:
        """The public keys that may connect, by identity; None where there are no keys."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Return False when the peer cannot be reached; the message is then dropped."""

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | ReceivedGroup | BadFrame]]: ...

    def disconnected(self) -> list[bytes]:
        """The peers whose control connection ended since the last call. One that connects again in between is among them."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ClientChannel(Protocol):
    """A producer's end: one trainer."""

    @property
    def endpoint(self) -> str:
        """The address of the trainer, for messages to people."""

    def send(self, message: Message) -> bool:
        """Return False when no peer listens; the message is then dropped."""

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]: ...

    def reset(self) -> None:
        """Drop the connection with everything queued in it and connects anew under a fresh routing id."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


BURST = 256  # frames taken from one socket before the other gets its turn
NOBLOCK = int(zmq.NOBLOCK)  # an enum costs more than a send
_SEND_HWM = 4096  # messages queued for one live peer before it counts as unreachable
_FAREWELL_MS = 2000  # for the last control messages, such as Bye, when a connection is closed


_OPTIONS = {
    zmq.LINGER: 0,
    zmq.HANDSHAKE_IVL: round(HANDSHAKE_S * 1000),
    zmq.TCP_KEEPALIVE: 1,  # a peer whose host is gone does not keep its connection
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 20,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.SNDHWM: _SEND_HWM,
    zmq.RCVHWM: _SEND_HWM,
}


def curve_client(secret: SecretKey, server: bytes) -> dict[int, Any]:
    """The options of a socket that connects as the owner of `secret`, and only to the owner of the public key `server`."""
    return {
        zmq.CURVE_SERVERKEY: server,
        zmq.CURVE_PUBLICKEY: secret.public(),
        zmq.CURVE_SECRETKEY: secret.reveal(),
    }


def take(socket: "zmq.Socket[bytes]") -> tuple[bytes, int]:
    """The next frame, and of how many it is the first. The others are dropped."""
    frame, num_frames = socket.recv(NOBLOCK), 1
    while socket.get(zmq.RCVMORE):
        socket.recv()
        num_frames += 1
    return frame, num_frames


def read(frame: bytes, num_frames: int, kinds: Any) -> Any:
    if num_frames > 1:
        return BadFrame(f"message of {num_frames} frames, expected 1", frame=frame)
    return received(frame, kinds)


_PATH_LIMIT = 107  # bytes, sizeof(sockaddr_un.sun_path) - 1


def _ipc_path(endpoint: str) -> Path | None:
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


@contextlib.contextmanager
def ipc_lock(endpoint: str) -> Iterator[None]:
    """Hold the lock beside an ipc endpoint. Other transports need none."""
    path = _ipc_path(endpoint)
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(f"{path}.lock", "ab", opener=private)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"transport.endpoint: cannot create {error.filename or path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise endpoint_error(error, endpoint) from error
        if path.is_socket():  # of a dead process
            path.unlink()
        elif path.exists():  # ZeroMQ would remove whatever is there
            raise ConfigError(f"transport.endpoint: {path} exists and is not a socket; name another path")
        yield


def check_path_length(endpoint: str) -> None:
    """Raise `ConfigError` for a path that no socket can have."""
    path = _ipc_path(endpoint)
    if path is not None and len(os.fsencode(path)) > _PATH_LIMIT:
        raise ConfigError(
            f"transport.endpoint: the socket path {path} is longer than {_PATH_LIMIT} bytes. "
            "Set a shorter one, e.g. transport.endpoint=tcp://127.0.0.1:5557 or ipc:///tmp/NAME/control.ipc"
        )


def endpoint_error(error: OSError, endpoint: str) -> SlipstreamError:
    fix = "Stop that trainer, or give this run an endpoint of its own (run_dir or transport.endpoint)"
    return cannot_listen(error, endpoint, "transport.endpoint", fix)


class ZmqChannel:
    def __init__(self, endpoints: tuple[str, ...], max_message_bytes: int) -> None:
        self._endpoints = endpoints
        self._context = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self.sockets: list[zmq.Socket[bytes]] = []  # for control, if it has one, and for blobs

    def _open(self, kind: int, options: dict[int, Any]) -> list[tuple["zmq.Socket[bytes]", str]]:
        """Open the sockets and returns them with their endpoints, not bound or connected yet."""
        for endpoint in self._endpoints:
            socket = self._context.socket(kind)
            self.sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
            check_path_length(endpoint)
            own = {zmq.IPV6: int("[" in endpoint), zmq.MAXMSGSIZE: self._max_message_bytes}
            for option, value in (_OPTIONS | own | options).items():
                socket.setsockopt(option, value)
        return list(zip(self.sockets, self._endpoints, strict=True))

    def _shut(self) -> None:
        for socket in self.sockets:
            self._poller.unregister(socket)
            socket.close(linger=0 if socket is self.sockets[-1] else _FAREWELL_MS)
        self.sockets = []

    def _of(self, message: Message) -> "zmq.Socket[bytes]":
        assert self.sockets, "channel is closed"
        return self.sockets[-1 if isinstance(message, BLOB_MESSAGES) else 0]

    def _frame(self, message: Message) -> bytes:
        frame = encode(message)
        if len(frame) > self._max_message_bytes:
            limit = f"transport.max_message_bytes={self._max_message_bytes}"
            raise CodecError(f"{type(message).__name__} of {len(frame)} bytes is above {limit}")
        return frame

    def _wait(self, timeout_s: float) -> list["zmq.Socket[bytes]"]:
        """Wait for anything to arrive and returns the sockets that have something, control before blobs."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return [socket for socket in self.sockets if socket in ready]

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the sockets. May be called twice. A later `wake` does nothing, because its descriptor may be another file by
        then."""
        self._shut()
        self._context.term()
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1


def own_address(host: str, family: int = system_sockets.AF_UNSPEC) -> str:
    """The address of the interface that leads to `host`, without brackets. Nothing is sent. Raises OSError if none does.

    Args:
        host: a name or an address.
        family: of the addresses, where it matters which `host` has.
    """
    family, *_, address = system_sockets.getaddrinfo(host, 9, family, system_sockets.SOCK_DGRAM)[0]
    with system_sockets.socket(family, system_sockets.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
