"""One connection of a ZeroMQ socket, watched through a duplicate of its descriptor.

Guarantee: what is read or shut here is this connection, and never another one that got the same descriptor later.
"""

import contextlib
import logging
import os
import resource
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger(__name__)

_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets in struct tcp_info, Linux 4.2 and newer
_DESCRIPTORS, _FEW_DESCRIPTORS = 65_536, 4096
_OTHER_DESCRIPTORS = 512
_FEWEST, _MOST_UNFINISHED = 64, 1024  # connections
_SLACK_BYTES = 2**20  # for a first message, and beside the largest one: framing, encryption
_RESET = struct.pack("=ii", 1, 0)  # linger for no time at all: a peer that goes on sending learns of its end


@dataclass
class WatchedConnection:
    socket: socket.socket  # a duplicate
    accepted_at: float
    finished: bool = False  # its handshake
    deliveries: int = 0  # messages that it had completed at the last check
    mark: int = 0  # bytes that it had sent then
    over_since: float | None = None  # when it was found to have sent too much
    was_reported: bool = False  # then
    was_shut: bool = False

    def has_finished(self, counts: tuple[int, int] | None, done_bytes: int, longest_s: float) -> bool:
        """Whether its handshake is over, by the byte `counts` of one moment: between two moments it could end unseen. It is when
        the peer acknowledged `done_bytes`, or after `longest_s`."""
        return counts is None or counts[0] >= done_bytes or time.monotonic() - self.accepted_at > longest_s

    def byte_counts(self) -> tuple[int, int] | None:
        """Bytes of ours that the peer acknowledged, and bytes of its own; None unless it is TCP."""
        if self.socket.family == socket.AF_UNIX:
            return None
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("=Q", info, _BYTES_ACKED)[0], struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]

    def exceeds(self, most: int, num_messages: int, received: int) -> bool:
        """Whether it has sent more than `most` bytes since it completed a message, of which it has `num_messages` by now."""
        if num_messages != self.deliveries:
            self.deliveries, self.mark, self.over_since, self.was_reported = num_messages, received, None, False
            return False
        unread = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)  # may wait for libzmq in the kernel
        is_over = received - self.mark > most + unread + _SLACK_BYTES
        if is_over and self.over_since is None:
            self.over_since = time.monotonic()
        return is_over

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


class ConnectionLimits(NamedTuple):
    connections: int
    unfinished: int  # of these, in their handshake
    finished: int  # not in their handshake; what is left is for those who come next
    of_one_key: int  # of these, that have said something


def limits(descriptors: int) -> ConnectionLimits:
    """How many connections a process with that many descriptors takes. Each needs two; some are for files and for libraries."""
    connections = max(_FEWEST, descriptors // 2 - _OTHER_DESCRIPTORS // 2)
    unfinished = min(_MOST_UNFINISHED, max(_FEWEST, connections // 4))
    return ConnectionLimits(connections, unfinished, connections * 15 // 16, connections * 3 // 4)


def raise_descriptor_limit() -> int:
    """Raises the soft limit to the hard one, as far as it is of use. Returns how many are sure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if 0 <= soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    sure = max(soft, highest)
    if sure < _FEW_DESCRIPTORS:
        logger.warning(
            "this process may open %d files, so at most %d producers can connect: raise the hard limit (`ulimit -Hn`, "
            "LimitNOFILE= of a systemd unit) for more",
            sure,
            limits(sure).finished // 2,
        )
    return sure
