"""Groups between the socket and the journal.

Guarantee: a group is acknowledged after it is in the journal and never before. Groups that arrive together are committed
together, at most `COMMIT_ROWS`, and none waits longer than `COMMIT_AFTER_S` for others. On a full disk they wait here, a
bounded number of them, and are tried again; the others stay with their producers, which send them again.
"""

from collections.abc import Callable, Set
from typing import NamedTuple

from consumer.publishing.policy_store import PolicyShelf
from protocol.throttle import Throttle
from protocol.transport.channel import ServerChannel
from protocol.wire.messages import Ack, Message, Nack
from replay.batches.delivery import Delivery
from replay.buffer import RolloutBuffer
from replay.journal.database import JournalFullError
from replay.journal.disk import DiskGuard
from replay.journal.writer import Journal

COMMIT_ROWS = 32
COMMIT_AFTER_S = 0.005

_MAX_UNWRITTEN = 1024  # groups
_MAX_BAD_FRAMES = 32  # per commit; the others are only counted


class _Arrival(NamedTuple):
    """A group that is not in the journal yet, and who waits for the answer."""

    peer: bytes
    delivery: Delivery


class Arrivals:
    """Belongs to the intake's thread."""

    def __init__(
        self,
        channel: ServerChannel,
        buffer: RolloutBuffer,
        journal: Journal,
        disk: DiskGuard,
        shelf: PolicyShelf,
        warn: Throttle,
        clock: Callable[[], float],
    ) -> None:
        self._channel = channel
        self._buffer = buffer
        self._journal = journal
        self._disk = disk
        self._shelf = shelf
        self._warn = warn
        self._clock = clock
        self._unwritten: dict[str, _Arrival] = {}  # by lease
        self._oldest_unwritten_at = 0.0
        self._is_disk_full = False  # as the last commit found it
        self._bad_frames: list[tuple[str, bytes]] = []

    def add(self, peer: bytes, delivery: Delivery) -> None:
        if len(self._unwritten) < _MAX_UNWRITTEN:
            if not self._unwritten:
                self._oldest_unwritten_at = self._clock()
            self._unwritten[delivery.group.group_id] = _Arrival(peer, delivery)

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Keeps a frame that cannot be used, for inspection."""
        if len(self._bad_frames) < _MAX_BAD_FRAMES:
            self._bad_frames.append((reason, frame))

    def waiting(self) -> Set[str]:
        """The leases whose groups are here."""
        return self._unwritten.keys()

    def is_commit_due(self) -> bool:
        """In the middle of a tick; its end commits the rest, and is soon enough for what the full disk refused."""
        return not self._is_disk_full and (
            len(self._unwritten) >= COMMIT_ROWS
            or (bool(self._unwritten) and self._clock() - self._oldest_unwritten_at > COMMIT_AFTER_S)
        )

    def commit(self) -> None:
        """Writes what has arrived, then acknowledges it. What finds no room on the disk stays and is tried again."""
        try:
            if self._bad_frames:
                self._journal.quarantine_frames(self._bad_frames)
                self._bad_frames = []
            while self._unwritten:
                arrivals = list(self._unwritten.values())[:COMMIT_ROWS]
                outcomes = self._buffer.offer([arrival.delivery for arrival in arrivals])
                for (peer, (group, *_)), outcome in zip(arrivals, outcomes, strict=True):
                    del self._unwritten[group.group_id]
                    if outcome == "unknown_lease":
                        answer: Message = Nack(group.group_id, "unknown_lease", "not a lease of this run")
                    else:
                        answer = Ack(group.group_id, outcome, self._shelf.newest)
                    self._channel.send(peer, answer)
            self._is_disk_full = False
        except JournalFullError as error:
            self._is_disk_full = True
            self._disk.spend_reserve()
            self._warn("disk_full", f"{error}; {len(self._unwritten)} groups wait in memory, the rest with producers")
