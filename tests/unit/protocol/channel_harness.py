"""One way to set up loopback, ipc and tcp channels, so that they share their tests."""

import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from protocol.channel.client import ZmqClient
from protocol.channel.keys import AUTHORIZED, ProducerKeys, TrainerKeys, generate, producer_keys, trainer_keys
from protocol.channel.server import ZmqServer
from protocol.wire.messages import BlobRequest, Bye, Nack, ProducerMessage
from tests.loopback import LoopbackServer
from tests.unit.protocol.samples import SHA

LIMIT = 4 * 2**20
MESSAGE = Nack("1.0", "returned")  # both sides send it
FIRST = Bye("stopping")
PATIENCE_S = 60.0  # for things that must happen; none of them takes that long


def reserve_port(stack: ExitStack) -> int:
    """A loopback port that stays ours: bound, but not listening, so that ZeroMQ (SO_REUSEADDR) can still bind it."""
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port


def eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)
    return result


def receive(channel: Any, count: int) -> list[Any]:
    """The next `count` things that arrive."""
    received: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} arrived: {received[-3:]}"
        received += channel.poll(0.2)
    return received


def numbered(number: int) -> Nack:
    return Nack(lease_id=str(number), reason="returned")


def introduce(server: Any, client: Any, first: ProducerMessage = FIRST) -> bytes:
    """Sends a first message and returns the routing id it arrives under."""
    eventually(lambda: client.send(first), "a server that listens")
    [(peer, message)] = receive(server, 1)
    assert message == first
    return peer


def introduce_blobs(server: Any, client: Any) -> bytes:
    return introduce(server, client, BlobRequest(SHA, 0, 1))


def keys_in(folder: Path) -> tuple[TrainerKeys, ProducerKeys]:
    generate(folder, "trainer")
    generate(folder, "gpu01")
    shutil.copy(folder / "gpu01.public", folder / AUTHORIZED)
    return trainer_keys(folder), producer_keys(folder, "gpu01")


class Harness:
    """Makes the two ends of one transport and closes them all at the end."""

    def __init__(self, transport: str, folder: Path, stack: ExitStack) -> None:
        self.transport = transport
        self.stack = stack
        if transport == "ipc":
            self.endpoints = (f"ipc://{folder}/control.ipc", f"ipc://{folder}/control.ipc.blobs")
        elif transport == "tcp":
            ports = [reserve_port(stack) for _ in range(2)]
            self.endpoints = (f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")

    def server(self, limit: int = LIMIT) -> Any:
        made = LoopbackServer() if self.transport == "loopback" else ZmqServer(*self.endpoints, limit)
        self.stack.callback(made.close)
        return made

    def client(self, server: Any, name: str = "producer", limit: int = LIMIT) -> Any:
        made = server.connect(name) if self.transport == "loopback" else ZmqClient(name, *self.endpoints, limit)
        self.stack.callback(made.close)
        return made

    def joined(self, limit: int = LIMIT) -> tuple[Any, Any, bytes]:
        """A server, a client that it has heard of, and the client's routing id."""
        server = self.server(limit)
        client = self.client(server, limit=limit)
        return server, client, introduce(server, client)

    def connect(self) -> socket.socket:
        """A stranger at the control socket."""
        path = self.endpoints[0].partition("://")[2]
        host, _, port = path.rpartition(":")
        family, address = (socket.AF_UNIX, path) if self.transport == "ipc" else (socket.AF_INET, (host, int(port)))
        stranger = self.stack.enter_context(socket.socket(family))
        stranger.connect(address)
        return stranger

    def inject_to_server(self, client: Any, frame: bytes) -> None:
        """Sends a frame past the codec."""
        if self.transport == "loopback":
            assert client.send_frame(frame)
        else:
            client.sockets[0].send(frame)

    def inject_to_client(self, server: Any, peer: bytes, frame: bytes) -> None:
        if self.transport == "loopback":
            server.clients[peer].put(b"", frame)
        else:
            server.sockets[0].send_multipart([peer, frame])
