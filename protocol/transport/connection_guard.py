"""Bounds on what peers can make a server keep: unfinished handshakes, connections, messages without end.

Guarantee: there are at most as many connections, in all, in their handshake and of one key, as `limits` says, but for what comes
within a tenth of a second; each handshake has at most `_HANDSHAKE_BYTES`. A connection is shut if it has sent more bytes than a
message, or a first message, may have and has completed none, and if its key was revoked. Every connection that libzmq or this
guard refuses is counted with its reason. What is done in a second does not grow with the number of idle connections.

libzmq bounds the size of a frame (`MAXMSGSIZE`) and the time of a handshake, but it collects the frames of one message without
limit and accepts connections until descriptors run out. It tells the descriptor of each connection (socket monitors) and of
each message (`SRCFD`), and Linux counts the bytes that a connection has received and that were acknowledged (`TCP_INFO`). The
guard works on duplicates of those descriptors, so it can never shut another connection that got the same number: libzmq reports
the end of a connection before it closes it, and the guard reads all reports before it acts. In between, the number may belong
to a file or to another socket, which the guard leaves alone. Connections over ipc have no such counts; there file permissions
decide who may connect, and only the number of all connections is bounded.
"""

import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import zmq

from protocol.security.authenticator import Authenticator
from protocol.security.authorized_keys import KeyRing
from protocol.security.rejections import Refusals
from protocol.transport.connection_ends import HANDSHAKE_S, MONITORED, reason_of_end
from protocol.transport.deliveries import ConnectionKey, Deliveries
from protocol.transport.places import Places
from protocol.transport.watched_connection import WatchedConnection, duplicate, limits, raise_descriptor_limit

logger = logging.getLogger(__name__)

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
        self._places = Places[ConnectionKey](self._limits)
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
                speakers = self.deliveries.take_speakers()
                self._read_events()  # their connections are known by then
                self._note_speakers(speakers)
                if time.monotonic() >= check_at:
                    self._check()
                    check_at = time.monotonic() + _CHECK_EVERY_S + _WATCHED_S * len(self._watched)
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

    def _begin(self, key: ConnectionKey) -> None:
        # A delivery that is there already is this connection's, whose owner was faster. Only if its predecessor's last message
        # was taken after its end, is it of that one, until this connection's first message.
        copy = duplicate(key[1])
        if copy is None:
            return
        self._connections[key] = self._watched[key] = connection = WatchedConnection(copy, time.monotonic())
        if len(self._connections) > self._limits.connections:
            self._shut(connection, "too_many_connections")

    def _end(self, key: ConnectionKey) -> None:
        """One thread of libzmq serves all connections, so a handshake's failure directly precedes its disconnect."""
        event, value = self._failures.pop(key[0], (0, 0))
        connection = self._connections.pop(key, None)
        self._watched.pop(key, None)
        is_finished = connection is not None and self._is_finished(key, connection, connection.byte_counts())
        reason = reason_of_end(
            event, value, connection, is_finished=is_finished, has_keys=self._authenticator is not None,
            can_authenticate=self._authenticator is None or self._authenticator.is_alive(),
        )  # fmt: skip
        if reason and not (connection and connection.was_shut):
            self._refusals(reason, connection.peer() if connection else "a connection that is gone")
        self._places.end(key)
        if connection:
            connection.socket.close()
        if self.deliveries.end(key):
            self._wake()

    def _shut(self, connection: WatchedConnection, reason: str) -> None:
        self._refusals(reason, connection.peer())
        connection.shut()

    def _note_speakers(self, keys: list[ConnectionKey]) -> None:
        for key in keys:
            connection, delivered = self._connections.get(key), self.deliveries.of(key)
            if connection is None or connection.was_shut or not delivered.num_messages:
                continue  # whoever spoke has left
            if not self._places.speak(key, delivered.user) and self._authorized is not None:
                self._shut(connection, "too_many_of_one_key")

    def _bound_connections(self) -> None:
        """Of those in their handshake the oldest are shut first, because an honest one takes no time."""
        unfinished = [one for one in self._watched.values() if not one.finished and not one.was_shut]
        surplus = [self._connections[key] for key in self._places.take_surplus()]
        for connection in unfinished[: -self._places.most_unfinished] + surplus:
            self._shut(connection, "too_many_connections")

    def _is_finished(self, key: ConnectionKey, connection: WatchedConnection, counts: tuple[int, int] | None) -> bool:
        if not connection.finished:
            connection.finished = self.deliveries.of(key).num_messages > 0 or connection.has_finished(
                counts, self._done_bytes, HANDSHAKE_S + 1
            )
            if connection.finished:
                self._places.finish(key)
        return connection.finished

    def _check(self) -> None:
        """Looks at every connection that is watched and, in turn, at some of the others; at all when the keys changed."""
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
        """Shuts what sends without end and completes no message, once the owner has taken all that was complete before."""
        if connection.over_since is None:
            return
        if not connection.was_reported:
            connection.was_reported = True
            self._wake()
        elif self.deliveries.drained_at(index) > connection.over_since:
            self._shut(connection, "multipart")
