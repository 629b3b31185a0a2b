"""The pair of ZeroMQ sockets that either end of a channel has: one for control and one for blobs.

Guarantee: no frame above `max_message_bytes` is accepted or sent, and a message of several frames is dropped whole.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import zmq

from protocol.transport.channel import BadFrame, received
from protocol.transport.connection_guard import HANDSHAKE_S
from protocol.transport.ipc import check_path_length
from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import BLOB_MESSAGES, Message

BURST = 256  # frames taken from one socket before the other gets its turn
NOBLOCK = int(zmq.NOBLOCK)  # an enum costs more than a send
_SEND_HWM = 4096  # messages queued for one live peer before it counts as unreachable
_FAREWELL_MS = 2000  # for the last control messages, such as Bye, when a connection is closed


def _configure(socket: zmq.Socket[bytes], endpoint: str, max_message_bytes: int) -> None:
    check_path_length(endpoint)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a peer whose host is gone does not keep its connection for ever
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 20)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, _SEND_HWM)


def take(socket: "zmq.Socket[bytes]") -> tuple[bytes, int]:
    """The next frame, and of how many it is the first. The others are dropped."""
    frame, num_frames = socket.recv(NOBLOCK), 1
    while socket.get(zmq.RCVMORE):
        socket.recv()
        num_frames += 1
    return frame, num_frames


def read(frame: bytes, num_frames: int, kinds: Any, note_schema: Callable[[int], None]) -> Any:
    """The message in it, one of `kinds`, or what is wrong with it."""
    if num_frames > 1:
        return BadFrame(f"message of {num_frames} frames, expected 1", frame=frame)
    return received(frame, kinds, note_schema)


class Sockets:
    """The two sockets, the wake-up descriptor and the poller that both ends share."""

    def __init__(self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int) -> None:
        self._endpoints = (control_endpoint, blob_endpoint)
        self.context = zmq.Context()
        self.max_message_bytes = max_message_bytes
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self.both: list[zmq.Socket[bytes]] = []

    def open(self, kind: int) -> list[tuple["zmq.Socket[bytes]", str]]:
        """Opens both sockets and returns them with their endpoints, not bound or connected yet."""
        self.both = [self.context.socket(kind) for _ in self._endpoints]
        for socket in self.both:
            self._poller.register(socket, zmq.POLLIN)
        for socket, endpoint in zip(self.both, self._endpoints, strict=True):
            _configure(socket, endpoint, self.max_message_bytes)
        return list(zip(self.both, self._endpoints, strict=True))

    def shut(self) -> None:
        for socket, linger in zip(self.both, (_FAREWELL_MS, 0), strict=False):
            self._poller.unregister(socket)
            socket.close(linger=linger)
        self.both = []

    @property
    def control(self) -> "zmq.Socket[bytes]":
        return self.both[0]

    def of(self, message: Message) -> "zmq.Socket[bytes]":
        assert self.both, "channel is closed"
        return self.both[isinstance(message, BLOB_MESSAGES)]

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
        return [socket for socket in self.both if socket in ready]

    def wake(self) -> None:
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """May be called twice. A later `wake` does nothing, because its descriptor may be another file by then."""
        self.shut()
        self.context.term()
        with self._wake_lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake_fd)
