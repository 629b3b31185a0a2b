"""One connection of a ZeroMQ socket, watched through a duplicate of its descriptor.

Guarantee: what is read or shut here is this connection, and never another one that got the same descriptor later.
"""

import contextlib
import os
import resource
import select
import socket
import struct
from dataclasses import dataclass

_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets in struct tcp_info, Linux 4.2 and newer
_DESCRIPTORS = 8192
_RESET = struct.pack("=ii", 1, 0)  # linger for no time at all: a peer that goes on sending learns of its end


@dataclass
class WatchedConnection:
    socket: socket.socket  # a duplicate
    accepted_at: float
    finished: bool = False  # its handshake
    deliveries: int = 0  # messages that it had completed at the last check
    mark: int = 0  # bytes that it had sent then
    over_since: float | None = None
    was_shut: bool = False

    def byte_counts(self) -> tuple[int, int] | None:
        """Bytes of ours that the peer acknowledged, and bytes of its own; None unless it is TCP."""
        if self.socket.family == socket.AF_UNIX:
            return None
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("=Q", info, _BYTES_ACKED)[0], struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]

    def peer_left(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def peer(self) -> str:
        try:
            name = self.socket.getpeername()
        except OSError:
            return "a connection that is gone"
        return f"the connection from {name[0]}:{name[1]}" if isinstance(name, tuple) else "a local connection"

    def shut(self) -> None:
        self.was_shut = True
        with contextlib.suppress(OSError):  # it has left
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.socket.shutdown(socket.SHUT_RDWR)


def duplicate(descriptor: int) -> socket.socket | None:
    """A duplicate of a connection's descriptor. None if the connection has ended and something else may have its number, or if
    no descriptors are left; then only the time limit of the handshake bounds it."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    with contextlib.suppress(OSError):  # a socket of nobody, or of one who left
        if found.type == socket.SOCK_STREAM and found.getpeername() is not None:
            return found
    found.close()
    return None


def raise_descriptor_limit() -> int:
    """Every connection takes two descriptors, and checkpoints and the journal need some too. Returns how many are sure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if 0 <= soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return highest
