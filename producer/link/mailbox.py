"""What other threads ask of the link.

Guarantee: nothing here blocks, and once the link has ended nothing happens any more.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from protocol.channel.channel import ClientChannel
from protocol.wire.messages import Group, Nack, PolicyInfo


class TakeAgain(NamedTuple):
    """The newest policy was not taken for a reason that may pass: download it again."""

    policy: PolicyInfo


Mail = Group | Nack | PolicyInfo | TakeAgain | Callable[[], None]
"""The answer to a lease; a policy to download, which `LinkEvents.fetched` tells; or what the link's thread is to do."""


class Mailbox:
    """`put` and `wake` may be called from any thread. The channel, which belongs to the link's, is woken."""

    def __init__(self, channel: ClientChannel) -> None:
        self.channel = channel
        self._items: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False

    def put(self, mail: Mail) -> None:
        self._items.put(mail)
        self.wake()

    def wake(self) -> None:
        with self._closing:
            if not self._closed:
                self.channel.wake()

    def take(self) -> Iterator[Mail]:
        while not self._items.empty():
            yield self._items.get_nowait()

    def close(self) -> None:
        """Closes the channel, too."""
        with self._closing:
            self._closed = True
            self.channel.close()
