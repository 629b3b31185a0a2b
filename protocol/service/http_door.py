"""HTTP ports: listening, and connections as uvicorn's HTTP/1.1 protocol with patience that ends.

Guarantee: a connection that has not sent a request's headers `patience_s` after it was made, or after their first byte, is
closed, and so is one whose answer is not over and taken `answer_s` after them; of more than `max_connections`, those that have
owed a request for longest are closed first; headers have at most `_MAX_HEADER_BYTES`. Each is counted.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.errors import cannot_listen

Reason = Literal["too_slow", "too_many_connections", "malformed"]
REASONS: tuple[Reason, ...] = get_args(Reason)

_FAREWELL_S = 2
_KEEP_ALIVE_S = 30
_MAX_HEADER_BYTES = 16 * 1024


def listen(host: str, port: int, host_key: str, port_key: str) -> socket.socket:
    """
    Args:
        port: 0 takes a free one.
        host_key: of the configuration, for messages, as is `port_key`.

    Raises:
        EndpointInUseError: another process has the port.
        ConfigError: this machine has no such address, or the port is not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        fix = "Choose another port, or 0 for a free one"
        raise cannot_listen(error, f"{host}:{port}", port_key, fix, host_key) from error


class Door:
    """Who is inside, and who owes a request.

    Args:
        answer_s: longer than the application takes for any answer, and than an idle connection is kept.
        refuse: is called with the reason of each connection that is closed.
    """

    def __init__(
        self, patience_s: float, answer_s: float, max_connections: int, refuse: Callable[[Reason], None]
    ) -> None:
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._max_connections = max_connections
        self.refuse = refuse
        self._inside: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # without a request, the longest first
        self._timers: dict[Connection, asyncio.TimerHandle] = {}

    def enter(self, connection: "Connection") -> None:
        self._inside.add(connection)
        self._idle[connection] = None
        self.expect(connection)
        if len(self._inside) > self._max_connections:
            self._close(next(iter(self._idle)), "too_many_connections")

    def leave(self, connection: "Connection") -> None:
        self._inside.discard(connection)
        self._forget(connection)

    def expect(self, connection: "Connection") -> None:
        """A request, soon."""
        if connection not in self._timers:
            self._wait(connection, self._patience_s)

    def settle(self, connection: "Connection") -> None:
        """Its request is here, and its answer begins."""
        if connection in self._idle:
            self._forget(connection)
            self._wait(connection, self._answer_s)

    def rest(self, connection: "Connection") -> None:
        """Its answer is sent, and another request may follow."""
        self._forget(connection)
        self._idle[connection] = None
        if connection.transport.get_write_buffer_size():  # it is still to take it
            self._wait(connection, self._answer_s)

    def shut(self) -> None:
        """Leaves nobody inside."""
        for connection in list(self._inside):
            connection.transport.abort()

    def _wait(self, connection: "Connection", seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(seconds, self._close, connection, "too_slow")

    def _forget(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _close(self, connection: "Connection", reason: Reason) -> None:
        self.refuse(reason)
        self._forget(connection)
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
        if self.transport.is_closing():  # when its client has taken what is left
            return
        self.door.rest(self)
        if self._is_answering():  # the next request came with the last one
            self.door.settle(self)

    def send_400_response(self, msg: str) -> None:
        self.door.refuse("malformed")
        super().send_400_response(msg)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class Server(uvicorn.Server):
    """Serves an application through a door. Leaves signals to the daemon."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._door = door
        http: Any = type("DoorConnection", (Connection,), {"door": door})
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # of malformed requests there are counts
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FAREWELL_S,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._door.shut()
