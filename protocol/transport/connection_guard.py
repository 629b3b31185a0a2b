"""Bounds on what strangers can make a server keep: unfinished handshakes, connections, messages without end.

Guarantee: at most `MAX_UNFINISHED` connections are in their handshake, each with at most `_HANDSHAKE_BYTES`; a connection
that has sent more than a message may hold, or a first one, and completed none, is shut, and so is one whose key was revoked.
Whatever libzmq or this guard turns away is counted with its reason.

libzmq bounds a frame (`MAXMSGSIZE`) and a handshake's time, but collects the frames of one message without limit, and
accepts connections until descriptors run out. It does say which descriptor a connection has (socket monitors) and which
one a message came over (`SRCFD`), and Linux counts what each has received and what was acknowledged (`TCP_INFO`). The guard
works on duplicates of those descriptors, so that it can never shut another connection that got the same number: libzmq
reports the end of a connection before it closes it, and the guard reads all reports before it acts. Between the two a number
may already name a file, or a socket of something else; that is let alone. Connections over ipc have no such counts; there,
who may connect is a matter of file permissions, and only the number of all connections is bounded.
"""

import contextlib
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from protocol.security.authenticator import Authenticator
from protocol.security.authorized_keys import AuthorizedKeys
from protocol.security.rejections import Refusals

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0  # given to libzmq, which ends what takes longer
MAX_UNFINISHED = 64
MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_HANDSHAKE_BYTES = 65_536  # far more than any handshake takes
_SLACK_BYTES = 2**20  # for a first message, and beside the largest one: framing, encryption
_CHECK_EVERY_S, _PER_CONNECTION_S = 0.02, 0.002  # so that checks stay below a hundredth of a core
_WATCHED_S = 0.0002  # instead, for each connection, while one is in its handshake or has sent too much
_REFRESH_EVERY_S = 0.5
_CURVE_DONE_BYTES = (
    270  # sent by us: greeting 64, WELCOME 170 and READY 60 or more; without READY at most an ERROR of 20
)
_NULL_DONE_BYTES = 80  # greeting 64, READY 40
_MECHANISM_MISMATCH, _CRYPTOGRAPHIC = 0x1100_0002, 0x1100_0001  # ZMQ_PROTOCOL_ERROR_ZMTP_...
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets in struct tcp_info, Linux 4.2 and newer

_DESCRIPTORS = 8192
_RESET = struct.pack("=ii", 1, 0)  # linger for no time at all: a peer that goes on sending learns of its end

_Key = tuple[int, int]  # lane, descriptor


@dataclass
class _Connection:
    socket: socket.socket  # a duplicate
    accepted_at: float
    finished: bool = False  # its handshake
    deliveries: int = 0  # messages that it had completed at the last check
    mark: int = 0  # bytes that it had sent then
    over_since: float | None = None
    was_shut: bool = False

    def counts(self) -> tuple[int, int] | None:
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


class ConnectionGuard(threading.Thread):
    """Watches over one server's sockets, its lanes, from a thread of its own.

    Args:
        monitors: PAIR sockets that receive the `MONITORED` events of the lanes; closed by whoever made them.
        wake: has the owner of the lanes take what has arrived, soon, and call `note_drained`.
    """

    def __init__(
        self,
        monitors: "list[zmq.Socket[bytes]]",
        refusals: Refusals,
        max_message_bytes: int,
        authorized: AuthorizedKeys | None,
        authenticator: Authenticator | None,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(name="connection-guard", daemon=True)
        self._monitors = monitors
        self._wake = wake
        self._refusals = refusals
        self._max_message_bytes = max_message_bytes
        self._authorized = authorized
        self._authenticator = authenticator
        self._done_bytes = _CURVE_DONE_BYTES if authenticator else _NULL_DONE_BYTES
        self._max_connections = max(MAX_UNFINISHED, _raise_descriptor_limit() // 4)
        self._connections: dict[_Key, _Connection] = {}
        self._failures: dict[int, tuple[int, int]] = {}  # by lane: event and value that explain its next disconnect
        self._deliveries: dict[_Key, int] = {}  # written by the owner of the lanes
        self._users: dict[_Key, bytes] = {}  # likewise
        self._drained_at = [0.0] * len(monitors)  # likewise
        self._said_dead = False
        self._refresh_at = 0.0
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._error: BaseException | None = None

    # Called by the thread that owns the lanes.

    def note_delivery(self, lane: int, descriptor: int, user: bytes) -> None:
        """A whole message has come over this connection."""
        key = lane, descriptor
        self._deliveries[key] = self._deliveries.get(key, 0) + 1
        self._users[key] = user

    def note_drained(self, lane: int) -> None:
        """Every whole message has been taken."""
        self._drained_at[lane] = time.monotonic()

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the thread. May be called twice."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self.ident is not None:
            self.join()
        os.close(self._stop_fd)
        self._stop_fd = -1
        while self._connections:
            self._connections.popitem()[1].socket.close()

    # The thread.

    def run(self) -> None:
        poller = zmq.Poller()
        for place in (*self._monitors, self._stop_fd):
            poller.register(place, zmq.POLLIN)
        check_at = 0.0
        try:
            while self._stop_fd not in dict(poller.poll(max(0, round((check_at - time.monotonic()) * 1000)))):
                self._read_events()
                self._bound_unfinished()
                if time.monotonic() >= check_at:
                    each = _WATCHED_S if self._check() else _PER_CONNECTION_S
                    check_at = time.monotonic() + _CHECK_EVERY_S + each * len(self._connections)
        except BaseException as error:
            self._error = error

    def _read_events(self) -> None:
        for lane, monitor in enumerate(self._monitors):
            while monitor.poll(0):
                event, value = struct.unpack("=Hi", monitor.recv_multipart()[0])
                if event == zmq.EVENT_ACCEPTED:
                    self._begin((lane, value))
                elif event == zmq.EVENT_DISCONNECTED:
                    self._end((lane, value))
                else:
                    self._failures[lane] = event, value

    def _begin(self, key: _Key) -> None:
        self._deliveries.pop(key, None)
        self._users.pop(key, None)
        duplicate = _duplicate(key[1])
        if duplicate is not None:
            self._connections[key] = _Connection(duplicate, time.monotonic())

    def _end(self, key: _Key) -> None:
        """One thread of libzmq serves all connections, so a handshake's failure directly precedes its disconnect."""
        event, value = self._failures.pop(key[0], (0, 0))
        connection = self._connections.pop(key, None)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            reason = {_MECHANISM_MISMATCH: "no_key", _CRYPTOGRAPHIC: "wrong_server_key"}.get(value, "bad_handshake")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            reason = None  # counted by the authenticator
        elif event and self._authenticator is not None and not self._authenticator.is_alive():
            reason = "authenticator_dead"
        else:
            reason = self._unsaid_reason(key, connection, in_handshake=event != 0) if connection else None
        if reason and not (connection and connection.was_shut):
            self._refusals(reason, connection.peer() if connection else "a connection that is gone")
        if connection:
            connection.socket.close()

    def _unsaid_reason(self, key: _Key, connection: _Connection, *, in_handshake: bool) -> str | None:
        """Why libzmq ended a connection of which it says nothing else; None if the peer did."""
        if connection.peer_left():
            counts = connection.counts()
            left_at_greeting = self._authenticator is not None and counts is not None and 64 <= counts[1] < 200
            return "no_key" if in_handshake and left_at_greeting else None  # it learned from ours that it needs one
        if not in_handshake:
            return "oversized" if self._is_finished(key, connection, connection.counts()) else "bad_handshake"
        return "handshake_timeout" if time.monotonic() - connection.accepted_at > HANDSHAKE_S - 0.5 else "bad_handshake"

    def _shut(self, connection: _Connection, reason: str) -> None:
        connection.was_shut = True
        self._refusals(reason, connection.peer())
        with contextlib.suppress(OSError):  # it has left
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.socket.shutdown(socket.SHUT_RDWR)

    def _open(self) -> list[tuple[_Key, _Connection]]:
        return [(key, connection) for key, connection in self._connections.items() if not connection.was_shut]

    def _bound_unfinished(self) -> None:
        """The oldest go first: an honest handshake takes no time."""
        if len(self._connections) <= MAX_UNFINISHED:
            return
        begun = [(key, one) for key, one in self._open() if not one.finished]
        unfinished = [one for key, one in begun if not self._is_finished(key, one, one.counts())]
        for connection in unfinished[:-MAX_UNFINISHED]:
            self._shut(connection, "too_many_connections")
        for _, connection in self._open()[self._max_connections :]:
            self._shut(connection, "too_many_connections")

    def _is_finished(self, key: _Key, connection: _Connection, counts: tuple[int, int] | None) -> bool:
        """Its handshake, by the `counts` of one moment: two of them could hide a handshake between them."""
        if not connection.finished:
            connection.finished = (
                counts is None
                or key in self._deliveries
                or counts[0] >= self._done_bytes
                or time.monotonic() - connection.accepted_at > HANDSHAKE_S + 1
            )
        return connection.finished

    def _check(self) -> bool:
        """Returns True when there is something to keep an eye on."""
        if self._authorized is not None and time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + _REFRESH_EVERY_S
            self._authorized.refresh()
        if self._authenticator is not None and not self._authenticator.is_alive() and not self._said_dead:
            self._said_dead = True
            logger.error("the authenticator is dead: no producer can connect any more until the trainer is restarted")
        watchful = False
        for key, connection in self._open():
            user, counts = self._users.get(key), connection.counts()
            if self._authorized is not None and user is not None and self._authorized.identity(user) is None:
                self._shut(connection, "revoked")
            elif not self._is_finished(key, connection, counts):
                watchful = True
                if counts is not None and counts[1] > _HANDSHAKE_BYTES:
                    self._shut(connection, "bad_handshake")
            elif counts is not None:
                watchful |= self._check_progress(key, connection, counts[1])
        return watchful

    def _check_progress(self, key: _Key, connection: _Connection, received: int) -> bool:
        """Shuts a connection that sends and sends and completes nothing. Returns True when it has sent too much so far."""
        deliveries = self._deliveries.get(key, 0)
        if deliveries != connection.deliveries:
            connection.deliveries, connection.mark, connection.over_since = deliveries, received, None
            return False
        unread = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)  # may wait for libzmq in the kernel
        most = (
            self._max_message_bytes if deliveries else 0
        )  # a hello is small; what a namesake sends, libzmq keeps for ever
        if received - connection.mark <= most + unread + _SLACK_BYTES:
            return False
        if connection.over_since is None:
            connection.over_since = time.monotonic()
            self._wake()
        elif self._drained_at[key[0]] > connection.over_since:  # else its messages may wait for their reader
            self._shut(connection, "multipart")
        return True


def _duplicate(descriptor: int) -> socket.socket | None:
    """Of a connection. None: it is gone and its number another thing's by now, or no descriptors are left; then HANDSHAKE_S
    has to do."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        duplicate = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    try:
        if duplicate.type == socket.SOCK_STREAM and duplicate.getpeername() is not None:
            return duplicate
    except OSError:  # a socket of nobody, or of one who left
        pass
    duplicate.close()
    return None


def _raise_descriptor_limit() -> int:
    """Every connection takes two descriptors, and checkpoints and the journal need some too. Returns how many are sure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if 0 <= soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return highest
