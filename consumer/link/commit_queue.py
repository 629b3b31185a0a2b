"""Groups between the socket and the journal.

Guarantee: a group is acknowledged after it is in the journal and never before. Groups that arrive together are committed
together, at most `COMMIT_ROWS`, and none waits longer than `COMMIT_AFTER_S` for others. On a full disk they wait here, a
bounded number of them, and are tried again; the others stay with their producers, which send them again.
"""

import contextlib
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import msgpack, structs

from consumer.link.policy_store import PolicyStore
from consumer.link.sessions import ProducerSession
from protocol.channel.channel import ReceivedGroup, ServerChannel
from protocol.runtime.logs import Throttle
from protocol.wire.codec import encode
from protocol.wire.messages import Ack, Message, Nack
from replay.batch_selection import OfferedGroup
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape, InvalidGroupError
from replay.journal.retention import DiskGuard
from replay.journal.writer import Journal, JournalFullError

COMMIT_ROWS = 32
COMMIT_AFTER_S = 0.005

_MAX_UNWRITTEN = 1024  # groups
_MAX_BAD_FRAMES = 32  # per commit; the others are only counted


class RolloutStorage(NamedTuple):
    """Buffer, journal and disk of the groups."""

    buffer: RolloutBuffer
    journal: Journal
    disk: DiskGuard


@dataclass(eq=False)
class CommitQueue:
    """Groups that wait for the next commit. The queue belongs to the intake's thread."""

    channel: ServerChannel
    storage: RolloutStorage
    store: PolicyStore
    shape: GroupShape  # of every group
    warn: Throttle
    clock: Callable[[], float]
    _unwritten: dict[str, tuple[bytes, OfferedGroup]] = field(
        default_factory=dict
    )  # by lease, with who waits for the answer
    _oldest_unwritten_at: float = 0.0
    _is_disk_full: bool = False  # as the last commit found it
    _bad_frames: list[tuple[str, bytes]] = field(default_factory=list)

    def take(self, peer: bytes, session: ProducerSession, received: ReceivedGroup) -> None:
        """Take a group, to be written with the next commit, or refuse it."""
        message, frame = received.message, received.frame
        session.leases.discard(message.lease_id)
        newest = max(self.store.newest.version, self.storage.buffer.newest_version)
        try:
            group = self.shape.parse(message)
            if group.newest_version > newest:
                raise InvalidGroupError(f"policy version {group.newest_version} was never published")
        except InvalidGroupError as error:
            warning = f"group {message.lease_id} of {session.name} is invalid: {error}"
            self.refuse("invalid", warning, warning, frame)
            self._end_lease(message.lease_id, "invalid", str(error))
            self.channel.send(peer, Nack(message.lease_id, "invalid", str(error)))
            return
        if len(self._unwritten) < _MAX_UNWRITTEN:
            if not self._unwritten:
                self._oldest_unwritten_at = self.clock()
            missing = b""
            if message.missing:
                missing, frame = msgpack.encode(message.missing), encode(structs.replace(message, missing=()))
            self._unwritten[group.lease_id] = (
                peer,
                OfferedGroup(group, frame, session.name, missing, session.of_this_run),
            )

    def take_failure(self, session: ProducerSession, message: Nack) -> None:
        session.leases.discard(message.lease_id)
        if message.reason == "returned":
            self.storage.buffer.give_back(message.lease_id)
            return
        self.warn(message.reason, f"{session.name} could not answer a prompt: {message.reason}: {message.detail}")
        self._end_lease(message.lease_id, message.reason, message.detail)

    def refuse(self, count: str, warning: str, reason: str, frame: bytes) -> None:
        """Count a frame that cannot be used, and keep it for inspection (`slipstream journal quarantine`)."""
        self.storage.buffer.totals[count] += 1
        self.warn(count, warning)
        if len(self._bad_frames) < _MAX_BAD_FRAMES:
            self._bad_frames.append((reason, frame))

    def waiting(self) -> Set[str]:
        """The leases whose groups are here."""
        return self._unwritten.keys()

    def is_commit_due(self) -> bool:
        """Return whether to commit before the end of the tick: 32 groups, or one that waited 5 ms. Never while the disk is
        full."""
        return not self._is_disk_full and (
            len(self._unwritten) >= COMMIT_ROWS
            or (bool(self._unwritten) and self.clock() - self._oldest_unwritten_at > COMMIT_AFTER_S)
        )

    def commit(self) -> None:
        """Write the groups that have arrived, then acknowledge them. Groups without room on the disk stay and are tried again."""
        try:
            if self._bad_frames:
                self.storage.journal.quarantine_frames(self._bad_frames)
                self._bad_frames = []
            while self._unwritten:
                arrivals = list(self._unwritten.values())[:COMMIT_ROWS]
                outcomes = self.storage.buffer.offer([delivery for _, delivery in arrivals])
                for (peer, (group, *_)), outcome in zip(arrivals, outcomes, strict=True):
                    del self._unwritten[group.lease_id]
                    if outcome == "unknown_lease":
                        answer: Message = Nack(group.lease_id, "unknown_lease", "not a lease of this run")
                    else:
                        answer = Ack(group.lease_id, outcome, self.store.newest)
                    self.channel.send(peer, answer)
            self._is_disk_full = False
        except JournalFullError as error:
            self._is_disk_full = True
            self.storage.disk.spend_reserve()
            self.warn("disk_full", f"{error}; {len(self._unwritten)} groups wait in memory, the rest with producers")

    def _end_lease(self, lease_id: str, reason: str, detail: str) -> None:
        """End a lease. On a full disk it may stay; then it ends with the first round that finds room (`RolloutBuffer.expire`)."""
        with contextlib.suppress(JournalFullError):
            self.storage.buffer.fail(lease_id, reason, detail, self.clock())
