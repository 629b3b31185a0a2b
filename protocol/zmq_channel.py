"""Channels over ZeroMQ: DEALER/ROUTER for control and a second pair for blobs.

Guarantee: a message is sent whole or `send` says False; nothing waits in a queue for a peer that is not there
(`IMMEDIATE`), no frame above `max_message_bytes` is accepted or sent, none is accepted of a kind that the other side does
not send, and an endpoint is served by one process at a time (ipc paths are locked, because ZeroMQ would otherwise let a
second bind steal a live one).
"""

import fcntl
import os
import stat
import threading
from pathlib import Path
from typing import Any

import zmq

from protocol.channel import BadFrame, received
from protocol.codec import CodecError, encode
from protocol.errors import ConfigError, EndpointInUseError
from protocol.messages import BLOB_MESSAGES, Message, ProducerMessage, TrainerMessage

_BURST = 256  # frames taken from one socket before the other gets its turn
_SEND_HWM = 4096  # messages queued for one live peer before it counts as unreachable
_FAREWELL_MS = 2000  # for the last control messages, such as Bye, when a connection is closed
_IPC_PATH_LIMIT = 107  # bytes, sizeof(sockaddr_un.sun_path) - 1


def _ipc_path(endpoint: str) -> Path | None:
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


def _lock_ipc(endpoint: str) -> int | None:
    """Takes the lock beside an ipc endpoint and returns its file descriptor; None for other transports."""
    path = _ipc_path(endpoint)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"transport.endpoint: cannot create {error.filename or path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_stale_socket(path)
    except BlockingIOError as error:
        os.close(descriptor)
        raise EndpointInUseError(_in_use(endpoint)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale_socket(path: Path) -> None:
    """Removes what a dead owner left behind. ZeroMQ unlinks whatever it finds at the path, so a file is refused here."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"transport.endpoint: {path} exists and is not a socket; name another path")
    path.unlink()


def _check_path_length(endpoint: str) -> None:
    path = _ipc_path(endpoint)
    if path is not None and len(os.fsencode(path)) > _IPC_PATH_LIMIT:
        raise ConfigError(
            f"transport.endpoint: the socket path {path} is longer than {_IPC_PATH_LIMIT} bytes. "
            "Set a shorter one, e.g. transport.endpoint=tcp://127.0.0.1:5557 or ipc:///tmp/NAME/control.ipc"
        )


def _in_use(endpoint: str) -> str:
    return (
        f"transport.endpoint: {endpoint} is in use by another process. Stop that trainer, or give this run an "
        "endpoint of its own (run_dir or transport.endpoint)"
    )


def _configure(socket: zmq.Socket[bytes], endpoint: str, max_message_bytes: int) -> None:
    _check_path_length(endpoint)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, _SEND_HWM)


def _received(parts: list[bytes], kinds: Any) -> Any:
    if len(parts) != 1:
        return BadFrame(f"message of {len(parts)} frames, expected 1", frame=parts[0] if parts else b"")
    return received(parts[0], kinds)


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

    def frame(self, message: Message) -> bytes:
        frame = encode(message)
        if len(frame) > self.max_message_bytes:
            raise CodecError(
                f"{type(message).__name__} of {len(frame)} bytes is above transport.max_message_bytes="
                f"{self.max_message_bytes}"
            )
        return frame

    def wait(self, timeout_s: float) -> list[list[bytes]]:
        """Waits for anything to arrive and returns the multiparts, control before blobs."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        received: list[list[bytes]] = []
        for socket in (self.control, self.blob):
            if socket is None or socket not in ready:
                continue
            for _ in range(_BURST):
                try:
                    received.append(socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
        return received

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

    Raises:
        EndpointInUseError: another process serves one of the endpoints.
        ConfigError: an endpoint that cannot be bound on this machine.
    """

    def __init__(self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int) -> None:
        self._sockets = _Sockets(control_endpoint, blob_endpoint, max_message_bytes)
        self._locks: list[int] = []
        try:
            self._bind()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        for socket, endpoint in self._sockets.open(zmq.ROUTER):
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            lock = _lock_ipc(endpoint)
            if lock is not None:
                self._locks.append(lock)
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    raise EndpointInUseError(_in_use(endpoint)) from error
                raise ConfigError(f"transport.endpoint: cannot bind {endpoint}: {error}") from error

    def send(self, peer: bytes, message: Message) -> bool:
        try:
            self._sockets.lane(message).send_multipart([peer, self._sockets.frame(message)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | BadFrame]]:
        return [(parts[0], _received(parts[1:], ProducerMessage)) for parts in self._sockets.wait(timeout_s)]

    def wake(self) -> None:
        self._sockets.wake()

    def close(self) -> None:
        self._sockets.close()
        while self._locks:
            os.close(self._locks.pop())


class ZmqClient:
    """A `ClientChannel` connected to the two endpoints of a trainer, which need not be there yet.

    Raises:
        ConfigError: an endpoint that nobody can connect to.
    """

    def __init__(self, name: str, control_endpoint: str, blob_endpoint: str, max_message_bytes: int) -> None:
        self._name = name
        self._sockets = _Sockets(control_endpoint, blob_endpoint, max_message_bytes)
        self._resets = 0
        try:
            self.reset()
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        self._sockets.shut()
        self._resets += 1
        for socket, endpoint in self._sockets.open(zmq.DEALER):
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.ROUTING_ID, f"{self._name}/{self._resets}".encode())
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"transport.endpoint: cannot connect to {endpoint}: {error}") from error

    def send(self, message: Message) -> bool:
        try:
            self._sockets.lane(message).send(self._sockets.frame(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]:
        return [_received(parts, TrainerMessage) for parts in self._sockets.wait(timeout_s)]

    def wake(self) -> None:
        self._sockets.wake()

    def close(self) -> None:
        self._sockets.close()
