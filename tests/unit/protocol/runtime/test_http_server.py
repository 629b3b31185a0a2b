"""Listening of the HTTP ports; what their connections may do is in test_exposition_clients.py."""

import socket

from protocol.runtime.http_server import listen


def test_connections_send_at_once() -> None:
    """Otherwise the body of an answer waits for the client to acknowledge the headers."""
    with listen("127.0.0.1", 0, "host", "port") as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        with client, connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
