"""Bounds the connections of a server, and decides which ones may stay.

Guarantee: one key can never keep the others out: it has at most `limits.of_one_key` connections that have sent a message. Where
there are more than `limits.finished`, the oldest silent connections go first, so a newcomer has as long to send its first message
as others need to fill the rest of the places anew.
"""

import logging
import resource
from collections import Counter
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

logger = logging.getLogger(__name__)

_DESCRIPTORS, _FEW_DESCRIPTORS = 65_536, 4096
_OTHER_DESCRIPTORS = 512
_FEWEST, _MOST_UNFINISHED = 64, 1024  # connections
Key = TypeVar("Key")


class ConnectionLimits(NamedTuple):
    connections: int
    unfinished: int  # of these, in their handshake
    finished: int  # not in their handshake; what is left is for those who come next
    of_one_key: int  # of these, that have sent a message


def limits(descriptors: int) -> ConnectionLimits:
    """Return how many connections a process with that many descriptors takes. Each needs two; some are for files and for
    libraries."""
    connections = max(_FEWEST, descriptors // 2 - _OTHER_DESCRIPTORS // 2)
    unfinished = min(_MOST_UNFINISHED, max(_FEWEST, connections // 4))
    return ConnectionLimits(connections, unfinished, connections * 15 // 16, connections * 3 // 4)


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, as far as it is of use. Returns how many are sure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if 0 <= soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    sure = max(soft, highest)
    if sure < _FEW_DESCRIPTORS:
        logger.warning(
            "this process may open %d files, so at most %d producers can connect: raise the hard limit (`ulimit -Hn`, "
            "LimitNOFILE= of a systemd unit) for more",
            sure,
            limits(sure).finished // 2,
        )
    return sure


class ConnectionQuota(Generic[Key]):
    """The places of connections whose handshake is over; `Key` names a connection."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._silent: dict[Key, None] = {}  # have sent nothing; oldest first
        self._users: dict[Key, bytes] = {}  # the others, by public key; oldest first
        self._num_of_user: Counter[bytes] = Counter()

    @property
    def most_unfinished(self) -> int:
        """Return how many others may be in their handshake, so that half of what is free stays free for who comes next."""
        free = self._limits.connections - len(self._silent) - len(self._users)
        return max(1, min(self._limits.unfinished, free // 2))

    def finish(self, key: Key) -> None:
        """Note that the handshake of a connection is over."""
        if key not in self._users:
            self._silent[key] = None

    def on_first_message(self, key: Key, user: bytes) -> bool:
        """Note the first message of a connection, under the public key `user`. Return whether that key has a place for it."""
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
        """Remove and return the connections above the quota: silent connections first, from the oldest, then the newest."""
        num_over = len(self._silent) + len(self._users) - self._limits.finished
        surplus = list(islice((*self._silent, *reversed(self._users)), num_over)) if num_over > 0 else []
        for key in surplus:
            self.end(key)
        return surplus
