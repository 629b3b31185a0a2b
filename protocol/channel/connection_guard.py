"""Bounds on what peers can make a server keep: unfinished handshakes, connections, messages without end.

Guarantee: there are at most as many connections, in all, in their handshake and of one key, as `limits` says, except for those of
the last tenth of a second; each handshake has at most `_HANDSHAKE_BYTES`. A connection is closed if it has sent more bytes than
a message, or a first message, may have and has completed none, and if its key was revoked. Every connection that libzmq or this
guard refuses is counted with its reason. The work per second does not grow with the number of idle connections.

libzmq bounds the size of a frame (`MAXMSGSIZE`) and the time of a handshake, but it collects the frames of one message without
limit and accepts connections until descriptors run out. It tells the descriptor of each connection (socket monitors) and of
each message (`SRCFD`), and Linux counts the bytes that a connection has received and that were acknowledged (`TCP_INFO`). The
guard works on duplicates of those descriptors, so it can never close another connection that got the same number: libzmq reports
the end of a connection before it closes it, and the guard reads all reports before it acts. In between, the number may belong
to a file or to another socket, which the guard leaves alone. Connections over ipc have no such counts; there file permissions
decide who may connect, and only the number of all connections is bounded.
"""

import contextlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import zmq

from protocol.channel.authenticator import Authenticator, KeyRing, Refusals
from protocol.channel.connection_quota import ConnectionQuota, limits, raise_descriptor_limit

logger = logging.getLogger(__name__)

_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets in struct tcp_info, Linux 4.2 and newer
_SLACK_BYTES = 2**20  # for a first message, and beside the largest one: framing, encryption
_RESET = struct.pack("=ii", 1, 0)  # linger for no time at all: a peer that goes on sending learns of its end


@dataclass
class WatchedConnection:
    socket: socket.socket  # a duplicate
    accepted_at: float
    is_sure: bool = False  # the duplicate was made before the connection ended
    finished: bool = False  # its handshake
    deliveries: int = 0  # messages that it had completed at the last check
    mark: int = 0  # bytes that it had sent then
    over_since: float | None = None  # when it was found to have sent too much
    was_reported: bool = False  # then
    was_shut: bool = False

    def may_be_another(self, descriptor: int) -> bool:
        """Return whether it may be one that got the number `descriptor` after the end of the connection that was accepted."""
        try:
            return not self.is_sure and os.path.sameopenfile(self.socket.fileno(), descriptor)
        except OSError:  # the number is free
            return False

    def has_finished(self, counts: tuple[int, int] | None, done_bytes: int, longest_s: float) -> bool:
        """Return whether its handshake is over, by the byte `counts` of one moment: between two moments it could end unseen. It
        is when the peer acknowledged `done_bytes`, or after `longest_s`."""
        return counts is None or counts[0] >= done_bytes or time.monotonic() - self.accepted_at > longest_s

    def byte_counts(self) -> tuple[int, int] | None:
        """Return the bytes of ours that the peer acknowledged, and the bytes that it sent; None unless it is TCP."""
        if self.socket.family == socket.AF_UNIX:
            return None
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("=Q", info, _BYTES_ACKED)[0], struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]

    def exceeds(self, most: int, num_messages: int, received: int) -> bool:
        """Return whether it has sent more than `most` bytes since it completed a message. It has completed `num_messages`."""
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
    with contextlib.suppress(OSError):  # a socket without a peer, or of one that left
        if found.type == socket.SOCK_STREAM and found.getpeername() is not None:
            return found
    found.close()
    return None


HANDSHAKE_S = 5.0  # given to libzmq, which ends what takes longer
MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_MECHANISM_MISMATCH, _CRYPTOGRAPHIC = 0x1100_0002, 0x1100_0001  # ZMQ_PROTOCOL_ERROR_ZMTP_...
_PROTOCOL_FAILURES = {_MECHANISM_MISMATCH: "no_key", _CRYPTOGRAPHIC: "wrong_server_key"}


def reason_of_end(
    event: int,
    value: int,
    connection: WatchedConnection | None,
    *,
    is_finished: bool,
    has_keys: bool,
    can_authenticate: bool,
) -> str | None:
    """Return one of `REASONS`; None if no peer was refused, or the authenticator has counted it. `event` and `value`
    are of the failed handshake, 0 if none failed; `is_finished` is said of the handshake."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return _PROTOCOL_FAILURES.get(value, "bad_handshake")
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return None
    if event and not can_authenticate:
        return "authenticator_dead"
    if connection is None:
        return None
    counts = connection.byte_counts()
    if connection.peer_left():
        left_at_greeting = has_keys and counts is not None and 64 <= counts[1] < 200
        return "no_key" if event and left_at_greeting else None  # it learned from ours that it needs one
    if not event:
        return "oversized" if is_finished else "bad_handshake"
    said_nothing = counts is not None and counts[1] == 0
    is_late = time.monotonic() - connection.accepted_at > HANDSHAKE_S - 0.5
    return "handshake_timeout" if said_nothing or is_late else "bad_handshake"


_MOST_ENDED = 65_536  # connections whose owner does not ask for them
ConnectionKey = tuple[int, int]  # index of the server's socket, descriptor


class Delivered(NamedTuple):
    """The messages of one connection. `user` and `peer` are the public key and the routing id of the last message."""

    num_messages: int = 0
    user: bytes = b""
    peer: bytes = b""


_NOTHING = Delivered()


class Deliveries:
    def __init__(self, num_sockets: int) -> None:
        self._delivered: dict[ConnectionKey, Delivered] = {}
        self._first_messages: deque[ConnectionKey] = deque()
        self._drained_at = [0.0] * num_sockets
        self._ended: deque[tuple[int, bytes]] = deque(maxlen=_MOST_ENDED)

    # The owner of the sockets calls these.

    def note(self, key: ConnectionKey, user: bytes, peer: bytes) -> None:
        """A whole message has come."""
        num_messages = self.of(key).num_messages
        self._delivered[key] = Delivered(num_messages + 1, user, peer)
        if not num_messages:
            self._first_messages.append(key)

    def note_drained(self, index: int) -> None:
        """Note that every whole message of a socket was taken."""
        self._drained_at[index] = time.monotonic()

    def take_ended(self) -> list[tuple[int, bytes]]:
        """The peers whose connections ended since the last call, by socket. They may have others by now."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    # The guard calls these.

    def of(self, key: ConnectionKey) -> Delivered:
        return self._delivered.get(key, _NOTHING)

    def take_first_messages(self) -> list[ConnectionKey]:
        """The connections over which a first message came since the last call."""
        return [self._first_messages.popleft() for _ in range(len(self._first_messages))]

    def drained_at(self, index: int) -> float:
        return self._drained_at[index]

    def end(self, key: ConnectionKey) -> bool:
        """The connection has ended. Returns whether there is a peer to be told of."""
        delivered = self._delivered.pop(key, None)
        if delivered is not None:
            self._ended.append((key[0], delivered.peer))
        return delivered is not None


_HANDSHAKE_BYTES = 65_536  # far more than any handshake takes
_CHECK_EVERY_S, _PER_CONNECTION_S = 0.02, 0.0005  # so that checks stay at about a hundredth of a core
_WATCHED_S = 0.0001  # instead, for each connection that is in its handshake or has sent too much
_REFRESH_EVERY_S = 0.5
_CURVE_DONE_BYTES = 270  # we have sent greeting 64, WELCOME 170, READY 60 or more; without READY an ERROR of 20 at most
_NULL_DONE_BYTES = 80  # greeting 64, READY 40


class ConnectionGuard(threading.Thread):
    """Watches over one server's sockets from a thread of its own. `wake` makes their owner take what has arrived, soon, and note
    that in `deliveries`."""

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
        self._limits = limits(raise_descriptor_limit())
        self._quota = ConnectionQuota[ConnectionKey](self._limits)
        self._connections: dict[ConnectionKey, WatchedConnection] = {}
        # Those in their handshake, or that have sent too much.
        self._watched: dict[ConnectionKey, WatchedConnection] = {}
        self._turn: Iterator[ConnectionKey] = iter(())  # of the others, to be checked
        self._checked_at = time.monotonic()
        self._failures: dict[int, tuple[int, int]] = {}  # by socket: event and value that explain its next disconnect
        self.deliveries = Deliveries(len(sockets))
        self._reported_dead = False
        self._refresh_at = 0.0
        self._revision = authorized.revision if authorized else 0
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._error: BaseException | None = None
        self._monitors = [socket.get_monitor_socket(MONITORED) for socket in sockets]

    # The thread that owns the sockets calls these.

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
                first_messages = self.deliveries.take_first_messages()
                self._read_events()  # their connections are known by then
                self._note_first_messages(first_messages)
                if time.monotonic() >= check_at:
                    self._check()
                    check_at = time.monotonic() + _CHECK_EVERY_S + _WATCHED_S * len(self._watched)
        except BaseException as error:
            self._error = error

    def _read_events(self) -> None:
        for index, monitor in enumerate(self._monitors):
            begun = []
            while monitor.poll(0):
                event, value = struct.unpack("=Hi", monitor.recv_multipart()[0])
                if event == zmq.EVENT_ACCEPTED:
                    self._begin((index, value))
                    begun.append((index, value))
                elif event == zmq.EVENT_DISCONNECTED:
                    self._end((index, value))
                else:
                    self._failures[index] = event, value
            for key in begun:
                if connection := self._connections.get(key):
                    connection.is_sure = True  # else its end had been read

    def _begin(self, key: ConnectionKey) -> None:
        # The owner thread may note a message before this thread sees the accept. Rarely it belongs to the previous connection
        # with the same descriptor; the next message corrects that.
        copy = duplicate(key[1])
        if copy is None:
            return
        self._connections[key] = self._watched[key] = connection = WatchedConnection(copy, time.monotonic())
        if len(self._connections) > self._limits.connections:
            self._shut(connection, "too_many_connections")

    def _end(self, key: ConnectionKey) -> None:
        """End a connection. One thread of libzmq serves all connections, so a handshake's failure directly precedes its
        disconnect."""
        event, value = self._failures.pop(key[0], (0, 0))
        connection = self._connections.pop(key, None)
        self._watched.pop(key, None)
        if connection is not None and connection.may_be_another(key[1]):
            connection.socket.close()
            connection = None
        is_finished = connection is not None and self._is_finished(key, connection, connection.byte_counts())
        reason = reason_of_end(
            event, value, connection, is_finished=is_finished, has_keys=self._authenticator is not None,
            can_authenticate=self._authenticator is None or self._authenticator.is_alive(),
        )  # fmt: skip
        if reason and not (connection and connection.was_shut):
            self._refusals(reason, connection.peer() if connection else "a connection that is gone")
        self._quota.end(key)
        if connection:
            connection.socket.close()
        if self.deliveries.end(key):
            self._wake()

    def _shut(self, connection: WatchedConnection, reason: str) -> None:
        self._refusals(reason, connection.peer())
        connection.shut()

    def _note_first_messages(self, keys: list[ConnectionKey]) -> None:
        for key in keys:
            connection, delivered = self._connections.get(key), self.deliveries.of(key)
            if connection is None or connection.was_shut or not delivered.num_messages:
                continue  # the sender has left
            if not self._quota.on_first_message(key, delivered.user) and self._authorized is not None:
                self._shut(connection, "too_many_of_one_key")

    def _bound_connections(self) -> None:
        """Close connections above the quota, of the unfinished ones the oldest first, because an honest handshake takes no
        time."""
        unfinished = [one for one in self._watched.values() if not one.finished and not one.was_shut]
        surplus = [self._connections[key] for key in self._quota.take_surplus()]
        for connection in unfinished[: -self._quota.most_unfinished] + surplus:
            self._shut(connection, "too_many_connections")

    def _is_finished(self, key: ConnectionKey, connection: WatchedConnection, counts: tuple[int, int] | None) -> bool:
        if not connection.finished:
            connection.finished = self.deliveries.of(key).num_messages > 0 or connection.has_finished(
                counts, self._done_bytes, HANDSHAKE_S + 1
            )
            if connection.finished:
                self._quota.finish(key)
        return connection.finished

    def _check(self) -> None:
        """Look at every connection that is watched and, in turn, at some of the others; at all when the keys changed."""
        now, since = time.monotonic(), self._checked_at
        self._checked_at = now
        num_others = math.ceil((now - since) / _PER_CONNECTION_S)
        if self._authorized is not None and now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_EVERY_S
            self._authorized.refresh()
            if self._authorized.revision != self._revision:
                self._revision = self._authorized.revision
                self._turn, num_others = iter(()), len(self._connections)
        if self._authenticator is not None and not self._authenticator.is_alive() and not self._reported_dead:
            self._reported_dead = True
            logger.error("the authenticator is dead: no producer can connect any more until the trainer is restarted")
        others = list(islice(self._turn, num_others))
        if len(others) < num_others:
            self._turn = iter(list(self._connections))
            others += islice(self._turn, num_others - len(others))
        for key in [*self._watched, *others]:
            self._check_one(key)
        self._bound_connections()

    def _check_one(self, key: ConnectionKey) -> None:
        connection = self._connections.get(key)
        needs_checks = False
        if connection is not None and not connection.was_shut:
            num_messages, user, _ = self.deliveries.of(key)
            counts = connection.byte_counts()
            if self._authorized is not None and num_messages and self._authorized.identity(user) is None:
                self._shut(connection, "revoked")
            elif not self._is_finished(key, connection, counts):
                needs_checks = True
                if counts is not None and counts[1] > _HANDSHAKE_BYTES:
                    self._shut(connection, "bad_handshake")
            elif counts is not None:
                # A hello is small. What a peer sends under the routing id of another one is never delivered, and libzmq keeps it.
                most = self._max_message_bytes if num_messages else 0
                needs_checks = connection.exceeds(most, num_messages, counts[1])
                self._bound_message(key[0], connection)
        if connection is not None and needs_checks:
            self._watched[key] = connection
        else:
            self._watched.pop(key, None)

    def _bound_message(self, index: int, connection: WatchedConnection) -> None:
        """Shut what sends without end and completes no message, once the owner has taken all that was complete before."""
        if connection.over_since is None:
            return
        if not connection.was_reported:
            connection.was_reported = True
            self._wake()
        elif self.deliveries.drained_at(index) > connection.over_since:
            self._shut(connection, "multipart")
