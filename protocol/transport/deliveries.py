"""What has come over the connections of a server: noted by the thread that owns its sockets, looked at by the connection guard's.

Guarantee: neither thread waits for the other. Who a connection is of is known from its first whole message on, and only from
that, because libzmq does not say it earlier.
"""

import time
from collections import deque
from typing import NamedTuple

_MOST_ENDED = 65_536  # connections whose owner does not ask for them
ConnectionKey = tuple[int, int]  # index of the server's socket, descriptor


class Delivered(NamedTuple):
    """Over one connection. `user` and `peer` are the public key and the routing id of the last message."""

    num_messages: int = 0
    user: bytes = b""
    peer: bytes = b""


_NOTHING = Delivered()


class Deliveries:
    def __init__(self, num_sockets: int) -> None:
        self._delivered: dict[ConnectionKey, Delivered] = {}
        self._speakers: deque[ConnectionKey] = deque()
        self._drained_at = [0.0] * num_sockets
        self._ended: deque[tuple[int, bytes]] = deque(maxlen=_MOST_ENDED)

    # The owner of the sockets calls these.

    def note(self, key: ConnectionKey, user: bytes, peer: bytes) -> None:
        """A whole message has come."""
        num_messages = self.of(key).num_messages
        self._delivered[key] = Delivered(num_messages + 1, user, peer)
        if not num_messages:
            self._speakers.append(key)

    def note_drained(self, index: int) -> None:
        """Every whole message of a socket was taken."""
        self._drained_at[index] = time.monotonic()

    def take_ended(self) -> list[tuple[int, bytes]]:
        """The peers whose connections ended since the last call, by socket. They may have others by now."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    # The guard calls these.

    def of(self, key: ConnectionKey) -> Delivered:
        return self._delivered.get(key, _NOTHING)

    def take_speakers(self) -> list[ConnectionKey]:
        """The connections over which a first message came since the last call."""
        return [self._speakers.popleft() for _ in range(len(self._speakers))]

    def drained_at(self, index: int) -> float:
        return self._drained_at[index]

    def end(self, key: ConnectionKey) -> bool:
        """The connection has ended. Returns whether there is a peer to be told of."""
        delivered = self._delivered.pop(key, None)
        if delivered is not None:
            self._ended.append((key[0], delivered.peer))
        return delivered is not None
