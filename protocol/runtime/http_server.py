"""HTTP ports: listening, and uvicorn's HTTP/1.1 with a limit on connections and on the time that each may take.

Guarantee: a connection whose request headers are not complete `header_timeout_s` after it was made, or after their first byte,
is closed. So is one whose answer is not over, or not read by its client, `answer_timeout_s` later. With more than
`max_connections`, the connections that have been idle for longest are closed first. Headers have at most `_MAX_HEADER_BYTES`.
Every connection that is closed for one of these reasons is counted.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    """Port 0 takes a free one. `EndpointInUseError` if another process has it, `ConfigError` if this machine has no such
    address or the port is not allowed, with the keys of the configuration."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        fix = "Choose another port, or 0 for a free one"
        raise cannot_listen(error, f"{host}:{port}", port_key, fix, host_key) from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, which this one does not; without it the body
    # of an answer waits some 40 ms for the client to acknowledge the headers.
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return server


@dataclass
class ConnectionLimiter:
    """The open connections, and which of them are idle. `answer_timeout_s` is longer than the application takes for any
    answer, and than an idle connection is kept. `on_refused` gets the reason of each connection that is closed."""

    header_timeout_s: float
    answer_timeout_s: float
    max_connections: int
    on_refused: Callable[[Reason], None]
    _open: "set[Connection]" = field(default_factory=set, init=False)
    _idle: "dict[Connection, None]" = field(default_factory=dict, init=False)  # without a request, the longest first
    _timers: "dict[Connection, asyncio.TimerHandle]" = field(default_factory=dict, init=False)

    def opened(self, connection: "Connection") -> None:
        self._open.add(connection)
        self._idle[connection] = None
        self.request_begun(connection)
        if len(self._open) > self.max_connections:
            self._close(next(iter(self._idle)), "too_many_connections")

    def closed(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._forget(connection)

    def request_begun(self, connection: "Connection") -> None:
        """Begin the time within which the headers must be complete."""
        if connection not in self._timers:
            self._limit(connection, self.header_timeout_s)

    def answer_begun(self, connection: "Connection") -> None:
        if connection in self._idle:
            self._forget(connection)
            self._limit(connection, self.answer_timeout_s)

    def answer_sent(self, connection: "Connection") -> None:
        """Another request may follow."""
        self._forget(connection)
        self._idle[connection] = None
        if connection.transport.get_write_buffer_size():  # its client has not read all of it
            self._limit(connection, self.answer_timeout_s)

    def close_all(self) -> None:
        for connection in list(self._open):
            connection.transport.abort()

    def _limit(self, connection: "Connection", seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(seconds, self._close, connection, "too_slow")

    def _forget(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _close(self, connection: "Connection", reason: Reason) -> None:
        self.on_refused(reason)
        self._forget(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    limiter: ConnectionLimiter

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.limiter.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.limiter.answer_begun(self)
        else:
            self.limiter.request_begun(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # when its client has read what is left
            return
        self.limiter.answer_sent(self)
        if self._is_answering():  # the next request came with the last one
            self.limiter.answer_begun(self)

    def send_400_response(self, msg: str) -> None:
        self.limiter.on_refused("malformed")
        super().send_400_response(msg)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class Server(uvicorn.Server):
    """Serves an application to as many connections as the limiter allows. Leaves signals to the daemon."""

    def __init__(self, app: ASGIApp, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        http: Any = type("LimitedConnection", (Connection,), {"limiter": limiter})
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
        self._limiter.close_all()
