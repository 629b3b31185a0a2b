"""What only the loopback can do: take its client off line."""

from protocol.wire.messages import Bye
from tests.loopback import LoopbackServer


def test_while_off_line_nobody_listens() -> None:
    server = LoopbackServer()
    client = server.connect("producer")
    client.online = False
    assert client.send(Bye("stopping")) is False
    assert server.poll(0) == []
    client.online = True
    assert client.send(Bye("stopping")) is True
    assert server.poll(0) == [(b"producer/1", Bye("stopping"))]


def test_after_the_server_closed_nobody_listens() -> None:
    server = LoopbackServer()
    client = server.connect("producer")
    server.close()
    assert client.send(Bye("stopping")) is False
    assert server.send(client.peer, Bye("stopping")) is False
