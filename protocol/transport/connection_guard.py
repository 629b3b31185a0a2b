"""Bounds on what peers can make a server keep: unfinished handshakes, connections, messages without end.

Guarantee: at most `MAX_UNFINISHED` connections are in their handshake, each with at most `_HANDSHAKE_BYTES`. A connection is shut
if it has sent more bytes than a message, or a first message, may have and has completed none, and if its key was revoked. Every
connection that libzmq or this guard refuses is counted with its reason.

libzmq bounds the size of a frame (`MAXMSGSIZE`) and the time of a handshake, but it collects the frames of one message without
limit and accepts connections until descriptors run out. It tells the descriptor of each connection (socket monitors) and of
each message (`SRCFD`), and Linux counts the bytes that a connection has received and that were acknowledged (`TCP_INFO`). The
guard works on duplicates of those descriptors, so it can never shut another connection that got the same number: libzmq reports
the end of a connection before it closes it, and the guard reads all reports before it acts. In between, the number may belong
to a file or to another socket, which the guard leaves alone. Connections over ipc have no such counts; there file permissions
decide who may connect, and only the number of all connections is bounded.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import zmq

from protocol.security.authenticator import Authenticator
from protocol.security.authorized_keys import KeyRing
from protocol.security.rejections import Refusals
from protocol.transport.watched_connection import WatchedConnection, duplicate, raise_descriptor_limit

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0  # given to libzmq, which ends what takes longer
MAX_UNFINISHED = 64
_MONITORED = (
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
_CURVE_DONE_BYTES = 270  # we have sent greeting 64, WELCOME 170, READY 60 or more; without READY an ERROR of 20 at most
_NULL_DONE_BYTES = 80  # greeting 64, READY 40
_MECHANISM_MISMATCH, _CRYPTOGRAPHIC = 0x1100_0002, 0x1100_0001  # ZMQ_PROTOCOL_ERROR_ZMTP_...
_PROTOCOL_FAILURES = {_MECHANISM_MISMATCH: "no_key", _CRYPTOGRAPHIC: "wrong_server_key"}

_Key = tuple[int, int]  # index of the server's socket, descriptor


class ConnectionGuard(threading.Thread):
    """Watches over one server's sockets from a thread of its own. `wake` makes their owner take what has arrived, soon, and
    call `note_drained`."""

    def __init__(
        self,
        sockets: "list[zmq.Socket[bytes]]",
        refusals: Refusals,
        max_message_bytes: int,
        authorized: KeyRing | None,
        authenticator: Authenticator | None,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(name="connection-guard", daemon=True)
        self._watched_sockets = sockets
        self._wake = wake
        self._refusals = refusals
        self._max_message_bytes = max_message_bytes
        self._authorized = authorized
        self._authenticator = authenticator
        self._done_bytes = _CURVE_DONE_BYTES if authenticator else _NULL_DONE_BYTES
        self._max_connections = max(MAX_UNFINISHED, raise_descriptor_limit() // 4)
        self._connections: dict[_Key, WatchedConnection] = {}
        self._failures: dict[int, tuple[int, int]] = {}  # by socket: event and value that explain its next disconnect
        # The owner of the sockets writes these two: the number of messages with the key of the last one, and a time.
        self._delivered: dict[_Key, tuple[int, bytes]] = {}
        self._drained_at = [0.0] * len(sockets)
        self._reported_dead = False
        self._refresh_at = 0.0
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._error: BaseException | None = None
        self._monitors = [socket.get_monitor_socket(_MONITORED) for socket in sockets]

    # The thread that owns the sockets calls these.

    def note_delivery(self, index: int, descriptor: int, user: bytes) -> None:
        """A whole message has come over this connection."""
        num_messages, _ = self._delivered.get((index, descriptor), (0, b""))
        self._delivered[index, descriptor] = num_messages + 1, user

    def note_drained(self, index: int) -> None:
        """The owner has taken every whole message."""
        self._drained_at[index] = time.monotonic()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """The thread reads events until the sockets send no more, because they would wait for it."""
        for watched in self._watched_sockets:
            watched.disable_monitor()
        os.eventfd_write(self._stop_fd, 1)
        if self.ident is not None:
            self.join()
        os.close(self._stop_fd)
        for monitor in self._monitors:
            monitor.close()
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
        for index, monitor in enumerate(self._monitors):
            while monitor.poll(0):
                event, value = struct.unpack("=Hi", monitor.recv_multipart()[0])
                if event == zmq.EVENT_ACCEPTED:
                    self._begin((index, value))
                elif event == zmq.EVENT_DISCONNECTED:
                    self._end((index, value))
                else:
                    self._failures[index] = event, value

    def _begin(self, key: _Key) -> None:
        self._delivered.pop(key, None)
        copy = duplicate(key[1])
        if copy is not None:
            self._connections[key] = WatchedConnection(copy, time.monotonic())

    def _end(self, key: _Key) -> None:
        """One thread of libzmq serves all connections, so a handshake's failure directly precedes its disconnect."""
        event, value = self._failures.pop(key[0], (0, 0))
        connection = self._connections.pop(key, None)
        reason: str | None = None
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            reason = _PROTOCOL_FAILURES.get(value, "bad_handshake")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            pass  # the authenticator has counted it
        elif event and self._authenticator is not None and not self._authenticator.is_alive():
            reason = "authenticator_dead"
        elif connection:
            reason = self._unreported_reason(key, connection, in_handshake=event != 0)
        if reason and not (connection and connection.was_shut):
            self._refusals(reason, connection.peer() if connection else "a connection that is gone")
        if connection:
            connection.socket.close()

    def _unreported_reason(self, key: _Key, connection: WatchedConnection, *, in_handshake: bool) -> str | None:
        """Why libzmq ended a connection without a reason; None if the peer ended it."""
        left, counts = connection.peer_left(), connection.byte_counts()
        if left:
            left_at_greeting = self._authenticator is not None and counts is not None and 64 <= counts[1] < 200
            return "no_key" if in_handshake and left_at_greeting else None  # it learned from ours that it needs one
        if not in_handshake:
            return "oversized" if self._is_finished(key, connection, counts) else "bad_handshake"
        return "handshake_timeout" if time.monotonic() - connection.accepted_at > HANDSHAKE_S - 0.5 else "bad_handshake"

    def _shut(self, connection: WatchedConnection, reason: str) -> None:
        self._refusals(reason, connection.peer())
        connection.shut()

    def _open(self) -> list[tuple[_Key, WatchedConnection]]:
        return [(key, connection) for key, connection in self._connections.items() if not connection.was_shut]

    def _bound_unfinished(self) -> None:
        """The oldest are shut first, because an honest handshake takes no time."""
        if len(self._connections) <= MAX_UNFINISHED:
            return
        unfinished = [
            one for key, one in self._open() if not one.finished and not self._is_finished(key, one, one.byte_counts())
        ]
        for connection in unfinished[:-MAX_UNFINISHED]:
            self._shut(connection, "too_many_connections")
        for _, connection in self._open()[self._max_connections :]:
            self._shut(connection, "too_many_connections")

    def _is_finished(self, key: _Key, connection: WatchedConnection, counts: tuple[int, int] | None) -> bool:
        """Whether its handshake is over, by the `counts` of one moment: between two moments it could end unseen."""
        if not connection.finished:
            connection.finished = (
                counts is None
                or key in self._delivered
                or counts[0] >= self._done_bytes
                or time.monotonic() - connection.accepted_at > HANDSHAKE_S + 1
            )
        return connection.finished

    def _check(self) -> bool:
        """Returns True while a connection needs frequent checks."""
        if self._authorized is not None and time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + _REFRESH_EVERY_S
            self._authorized.refresh()
        if self._authenticator is not None and not self._authenticator.is_alive() and not self._reported_dead:
            self._reported_dead = True
            logger.error("the authenticator is dead: no producer can connect any more until the trainer is restarted")
        needs_checks = False
        for key, connection in self._open():
            num_messages, user = self._delivered.get(key, (0, b""))
            counts = connection.byte_counts()
            if self._authorized is not None and num_messages and self._authorized.identity(user) is None:
                self._shut(connection, "revoked")
            elif not self._is_finished(key, connection, counts):
                needs_checks = True
                if counts is not None and counts[1] > _HANDSHAKE_BYTES:
                    self._shut(connection, "bad_handshake")
            elif counts is not None:
                needs_checks |= self._check_progress(key[0], connection, num_messages, counts[1])
        return needs_checks

    def _check_progress(self, index: int, connection: WatchedConnection, num_messages: int, received: int) -> bool:
        """Shuts a connection that sends without end and completes no message. Returns True if it has sent too much so far."""
        if num_messages != connection.deliveries:
            connection.deliveries, connection.mark, connection.over_since = num_messages, received, None
            return False
        unread = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)  # may wait for libzmq in the kernel
        # A hello is small. What a peer sends under the routing id of another one is never delivered, and libzmq keeps it.
        most = self._max_message_bytes if num_messages else 0
        if received - connection.mark <= most + unread + _SLACK_BYTES:
            return False
        if connection.over_since is None:
            connection.over_since = time.monotonic()
            self._wake()
        elif self._drained_at[index] > connection.over_since:  # else its messages may wait for their reader
            self._shut(connection, "multipart")
        return True
