"""The ZeroMQ sockets that either end of a channel has: one for control and one for blobs, or a single one for blobs.

Guarantee: no frame above `max_message_bytes` is accepted or sent, and a message of several frames is dropped whole.
"""

import os
import threading
from typing import Any

import zmq

from protocol.security.keys import SecretKey
from protocol.transport.channel import BadFrame, received
from protocol.transport.connection_ends import HANDSHAKE_S
from protocol.transport.ipc import check_path_length
from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import Message
from protocol.wire.policy_messages import BLOB_MESSAGES

BURST = 256  # frames taken from one socket before the other gets its turn
NOBLOCK = int(zmq.NOBLOCK)  # an enum costs more than a send
_SEND_HWM = 4096  # messages queued for one live peer before it counts as unreachable
_FAREWELL_MS = 2000  # for the last control messages, such as Bye, when a connection is closed


_OPTIONS = {
    zmq.LINGER: 0,
    zmq.HANDSHAKE_IVL: round(HANDSHAKE_S * 1000),
    zmq.TCP_KEEPALIVE: 1,  # a peer whose host is gone does not keep its connection for ever
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 20,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.SNDHWM: _SEND_HWM,
    zmq.RCVHWM: _SEND_HWM,
}


def curve_client(secret: SecretKey, server: bytes) -> dict[int, Any]:
    """The options of a socket that connects as the owner of `secret` to nobody but the owner of the public key `server`."""
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
        """Opens the sockets and returns them with their endpoints, not bound or connected yet."""
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
        """Waits for anything to arrive and returns the sockets that have something, control before blobs."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return [socket for socket in self.sockets if socket in ready]

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """May be called twice. A later `wake` does nothing, because its descriptor may be another file by then."""
        self._shut()
        self._context.term()
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
