"""Who has the places for connections.

Guarantee: pure. One key can never keep the others out: it has at most `limits.of_one_key` connections that have said something,
and where there are more than `limits.finished`, those go first that have said nothing for longest, whosever they are. So a
newcomer has as long to say who it is as others need to fill the rest of the places anew.
"""

from collections import Counter
from itertools import islice
from typing import Generic, TypeVar

from protocol.transport.watched_connection import ConnectionLimits

Key = TypeVar("Key")


class Places(Generic[Key]):
    """Of connections whose handshake is over; `Key` names one."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._silent: dict[Key, None] = {}  # have said nothing; oldest first
        self._users: dict[Key, bytes] = {}  # the others: by which public key; oldest first
        self._num_of_user: Counter[bytes] = Counter()

    @property
    def most_unfinished(self) -> int:
        """How many others may be in their handshake, so that half of what is free stays free for who comes next."""
        free = self._limits.connections - len(self._silent) - len(self._users)
        return max(1, min(self._limits.unfinished, free // 2))

    def finish(self, key: Key) -> None:
        """Its handshake is over."""
        if key not in self._users:
            self._silent[key] = None

    def speak(self, key: Key, user: bytes) -> bool:
        """Its first message came, under the public key `user`. Returns whether that has a place for it."""
        self.end(key)
        self._users[key] = user
        self._num_of_user[user] += 1
        return self._num_of_user[user] <= self._limits.of_one_key

    def end(self, key: Key) -> None:
        self._silent.pop(key, None)
        if (user := self._users.pop(key, None)) is not None:
            self._num_of_user[user] -= 1
            if not self._num_of_user[user]:
                del self._num_of_user[user]

    def take_surplus(self) -> list[Key]:
        """Those that have to go, and have no place any more: who has said nothing, the oldest first, then the newest."""
        num_over = len(self._silent) + len(self._users) - self._limits.finished
        surplus = list(islice((*self._silent, *reversed(self._users)), num_over)) if num_over > 0 else []
        for key in surplus:
            self.end(key)
        return surplus
