"""What other threads ask of the link.

Guarantee: nothing here blocks, and once the link has ended nothing happens any more.
"""

import queue
import threading
from collections.abc import Callable, Iterator

from protocol.transport.channel import ClientChannel
from protocol.wire.messages import Group, Nack, PolicyInfo


class Mailbox:
    """Every method but `take` and `close` may be called from any thread. The channel, which belongs to the link's, is woken."""

    def __init__(self, channel: ClientChannel) -> None:
        self.channel = channel
        self._items: queue.SimpleQueue[Group | Nack | PolicyInfo | Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False

    def answer(self, message: Group | Nack) -> None:
        """Settles a lease from this side."""
        self._put(message)

    def fetch(self, policy: PolicyInfo) -> None:
        """Has this policy downloaded, which `LinkEvents.fetched` tells. While it is under way, it is downloaded once."""
        self._put(policy)

    def call(self, work: Callable[[], None]) -> None:
        """Has the link's thread do this."""
        self._put(work)

    def _put(self, item: Group | Nack | PolicyInfo | Callable[[], None]) -> None:
        self._items.put(item)
        self.wake()

    def wake(self) -> None:
        with self._closing:
            if not self._closed:
                self.channel.wake()

    def take(self) -> Iterator[Group | Nack | PolicyInfo | Callable[[], None]]:
        while not self._items.empty():
            yield self._items.get_nowait()

    def close(self) -> None:
        """Closes the channel, too."""
        with self._closing:
            self._closed = True
            self.channel.close()
