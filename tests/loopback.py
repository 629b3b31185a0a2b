"""Channels inside one process, for tests: the interfaces of `protocol.channel.channel` without sockets.

Guarantee: every message passes through the real codec, so what works here is encodable, and messages of one peer stay
in order.
"""

import threading
from collections import deque

from protocol.channel.channel import BadFrame, ReceivedGroup, received
from protocol.wire.codec import encode
from protocol.wire.messages import Message, ProducerMessage, TrainerMessage


class _Mailbox:
    def __init__(self) -> None:
        self._items: deque[tuple[bytes, bytes]] = deque()
        self._condition = threading.Condition()
        self._woken = False

    def put(self, peer: bytes, frame: bytes) -> None:
        with self._condition:
            self._items.append((peer, frame))
            self._condition.notify()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def take_all(self, timeout_s: float) -> list[tuple[bytes, bytes]]:
        with self._condition:
            self._condition.wait_for(lambda: self._items or self._woken, timeout_s)
            items = list(self._items)
            self._items.clear()
            self._woken = False
            return items


class LoopbackServer:
    """A `ServerChannel`. `connect` returns the client end of a new peer."""

    def __init__(self) -> None:
        self.inbox = _Mailbox()
        self.clients: dict[bytes, _Mailbox] = {}
        self.keys: dict[str, bytes] | None = None
        self.ended: list[bytes] = []  # peers, for `disconnected`

    def connect(self, name: str) -> "LoopbackClient":
        return LoopbackClient(self, name)

    def authorized(self) -> dict[str, bytes] | None:
        return self.keys

    def send(self, peer: bytes, message: Message) -> bool:
        mailbox = self.clients.get(peer)
        if mailbox is None:
            return False
        mailbox.put(b"", encode(message))
        return True

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | ReceivedGroup | BadFrame]]:
        return [(peer, received(frame, ProducerMessage)) for peer, frame in self.inbox.take_all(timeout_s)]

    def disconnected(self) -> list[bytes]:
        ended, self.ended = self.ended, []
        return ended

    def wake(self) -> None:
        self.inbox.wake()

    def close(self) -> None:
        self.clients.clear()


class LoopbackClient:
    """A `ClientChannel`. While `online` is False it behaves as if nobody listened."""

    endpoint = "loopback"

    def __init__(self, server: LoopbackServer, name: str) -> None:
        self.online = True
        self._server = server
        self._name = name
        self._resets = 0
        self._inbox = _Mailbox()
        self.reset()

    @property
    def peer(self) -> bytes:
        return f"{self._name}/{self._resets}".encode()

    def send(self, message: Message) -> bool:
        return self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> bool:
        if not self.online or self.peer not in self._server.clients:
            return False
        self._server.inbox.put(self.peer, frame)
        return True

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]:
        return [received(frame, TrainerMessage) for _, frame in self._inbox.take_all(timeout_s)]

    def reset(self) -> None:
        self._server.clients.pop(self.peer, None)
        self._resets += 1
        self._inbox = _Mailbox()
        self._server.clients[self.peer] = self._inbox

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        self._server.clients.pop(self.peer, None)
