"""Channels over ZeroMQ: DEALER/ROUTER for control and a second pair for blobs.

Guarantee: a message is sent whole or `send` says False; nothing waits in a queue for a peer that is not there
(`IMMEDIATE`), no frame above `max_message_bytes` is accepted or sent, and an endpoint is served by one process at a time
(ipc paths are locked, because ZeroMQ would otherwise let a second bind steal a live one).
"""

import fcntl
import os
import stat
from pathlib import Path

import zmq

from protocol.channel import BadFrame
from protocol.codec import CodecError, SchemaMismatchError, decode, encode
from protocol.errors import ConfigError, EndpointInUseError
from protocol.messages import BLOB_MESSAGES, Message

_BURST = 256  # frames taken from one socket before the other gets its turn
_SEND_HWM = 4096  # messages queued for one live peer before it counts as unreachable
_IPC_PATH_LIMIT = 107  # bytes, sizeof(sockaddr_un.sun_path) - 1


def _ipc_path(endpoint: str) -> Path | None:
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


def _lock_ipc(endpoint: str) -> int | None:
    """Takes the lock beside an ipc endpoint and returns its file descriptor; None for other transports."""
    path = _ipc_path(endpoint)
    if path is None:
        return None
    if len(os.fsencode(path)) > _IPC_PATH_LIMIT:
        raise ConfigError(
            f"transport.endpoint: the socket path {path} is longer than {_IPC_PATH_LIMIT} bytes. "
            "Set a shorter one, e.g. transport.endpoint=tcp://127.0.0.1:5557 or ipc:///tmp/NAME/control.ipc"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise EndpointInUseError(_in_use(endpoint)) from error
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()
    return descriptor


def _in_use(endpoint: str) -> str:
    return (
        f"transport.endpoint: {endpoint} is in use by another process. Stop that trainer, or give this run an "
        "endpoint of its own (run_dir or transport.endpoint)"
    )


def _configure(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, _SEND_HWM)


def _decoded(parts: list[bytes]) -> Message | BadFrame:
    if len(parts) != 1:
        return BadFrame(f"message of {len(parts)} frames, expected 1")
    try:
        return decode(parts[0])
    except SchemaMismatchError as error:
        return BadFrame(str(error), error.peer_version)
    except CodecError as error:
        return BadFrame(str(error))


class _Sockets:
    """The two sockets, the wake-up descriptor and the poller that both ends share."""

    def __init__(self, max_message_bytes: int) -> None:
        self.context = zmq.Context()
        self.max_message_bytes = max_message_bytes
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self.control: zmq.Socket[bytes] | None = None
        self.blob: zmq.Socket[bytes] | None = None

    def open(self, kind: int) -> None:
        self.control, self.blob = (self.context.socket(kind) for _ in range(2))
        for socket in (self.control, self.blob):
            _configure(socket, self.max_message_bytes)
            self._poller.register(socket, zmq.POLLIN)

    def shut(self) -> None:
        for socket in (self.control, self.blob):
            if socket is not None:
                self._poller.unregister(socket)
                socket.close(linger=0)
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
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self.shut()
        self.context.term()
        os.close(self._wake_fd)


class ZmqServer:
    """A `ServerChannel` bound to two endpoints.

    Raises:
        EndpointInUseError: another process serves one of the endpoints.
        ConfigError: an endpoint that cannot be bound on this machine.
    """

    def __init__(self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int) -> None:
        self._sockets = _Sockets(max_message_bytes)
        self._locks: list[int] = []
        try:
            self._bind(control_endpoint, blob_endpoint)
        except BaseException:
            self.close()
            raise

    def _bind(self, control_endpoint: str, blob_endpoint: str) -> None:
        self._sockets.open(zmq.ROUTER)
        for socket, endpoint in ((self._sockets.control, control_endpoint), (self._sockets.blob, blob_endpoint)):
            assert socket is not None
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

    def poll(self, timeout_s: float) -> list[tuple[bytes, Message | BadFrame]]:
        return [(parts[0], _decoded(parts[1:])) for parts in self._sockets.wait(timeout_s)]

    def wake(self) -> None:
        self._sockets.wake()

    def close(self) -> None:
        self._sockets.close()
        for descriptor in self._locks:
            os.close(descriptor)


class ZmqClient:
    """A `ClientChannel` connected to the two endpoints of a trainer, which need not be there yet."""

    def __init__(self, name: str, control_endpoint: str, blob_endpoint: str, max_message_bytes: int) -> None:
        self._name = name
        self._endpoints = (control_endpoint, blob_endpoint)
        self._sockets = _Sockets(max_message_bytes)
        self._resets = 0
        self.reset()

    def reset(self) -> None:
        self._sockets.shut()
        self._resets += 1
        self._sockets.open(zmq.DEALER)
        for socket, endpoint in zip((self._sockets.control, self._sockets.blob), self._endpoints, strict=True):
            assert socket is not None
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.ROUTING_ID, f"{self._name}/{self._resets}".encode())
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(endpoint)

    def send(self, message: Message) -> bool:
        try:
            self._sockets.lane(message).send(self._sockets.frame(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float) -> list[Message | BadFrame]:
        return [_decoded(parts) for parts in self._sockets.wait(timeout_s)]

    def wake(self) -> None:
        self._sockets.wake()

    def close(self) -> None:
        self._sockets.close()
