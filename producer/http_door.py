"""Connections to the endpoint, as uvicorn's HTTP/1.1 protocol with patience that ends.

Guarantee: a connection that has not sent a request's headers `patience_s` after it was made, or after their first byte, is
closed; of more than `max_connections`, those that have owed a request for longest are closed first. Each is counted.
"""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from producer.refused import Reason


class Door:
    """Who is inside and owes a request."""

    def __init__(self, patience_s: float, max_connections: int, refused: "Counter[Reason]") -> None:
        self._patience_s = patience_s
        self._max_connections = max_connections
        self.refused = refused
        self._inside = 0
        self._idle: dict[Connection, None] = {}  # without a request, the longest first
        self._timers: dict[Connection, asyncio.TimerHandle] = {}

    def enter(self, connection: "Connection") -> None:
        self._inside += 1
        self._idle[connection] = None
        self.expect(connection)
        if self._inside > self._max_connections:
            self._close(next(iter(self._idle)), "too_many_connections")

    def leave(self, connection: "Connection") -> None:
        self._inside -= 1
        self.settle(connection)

    def expect(self, connection: "Connection") -> None:
        """A request, soon."""
        if connection not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[connection] = loop.call_later(self._patience_s, self._close, connection, "too_slow")

    def settle(self, connection: "Connection") -> None:
        """Its request is here."""
        self._idle.pop(connection, None)
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def rest(self, connection: "Connection") -> None:
        """Its answer is sent, and another request may follow."""
        self._idle[connection] = None

    def _close(self, connection: "Connection", reason: Reason) -> None:
        self.refused[reason] += 1
        self.settle(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    """Tells the door of its class what happens."""

    door: Door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.door.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.door.settle(self)
        else:
            self.door.expect(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering() and not self.transport.is_closing():
            self.door.rest(self)

    def send_400_response(self, msg: str) -> None:
        self.door.refused["malformed"] += 1
        super().send_400_response(msg)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def connections_of(door: Door) -> Any:
    """The class of connections that come through this door."""
    return type("DoorConnection", (Connection,), {"door": door})
