"""Giving prompts to producers.

Guarantee: a prompt that cannot be sent fails alone; no prompt is leased while the disk has no room for the groups that would come
back. Prompts go out in the order in which the ledger leases them.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from consumer.link.policy_store import PolicyStore
from consumer.link.sessions import ProducerSession, RoomQueue, give_leases
from protocol.channel.channel import ServerChannel
from protocol.errors import DatasetError
from protocol.wire.codec import CodecError
from protocol.wire.messages import Ack, Group, Lease, Nack, PolicyInfo, Sampling
from replay.buffer import RolloutBuffer
from replay.journal.database import JournalFullError
from replay.journal.disk import DiskGuard

_LOOK_AT_DISK_EVERY_S = 1.0
_REFILL_EVERY_S = 0.05


class Prompts(Protocol):
    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """Return the prompt and the columns of its row. Raises DatasetError for a row without a usable prompt."""
        ...


@dataclass(eq=False)
class LeaseDispatcher:
    """See the module's guarantee. `warn` is told of what went wrong, by kind."""

    channel: ServerChannel
    buffer: RolloutBuffer
    prompts: Prompts
    disk: DiskGuard
    sampling: Sampling
    timeout_s: float
    warn: Callable[[str, str], Any]
    clock: Callable[[], float] = time.monotonic
    _queue: RoomQueue = field(default_factory=lambda: RoomQueue(lambda session: session.room))
    _refill_at: float = -math.inf
    _look_at_disk_at: float = 0.0

    def note(self, peer: bytes, session: ProducerSession) -> None:
        """Its room may have grown."""
        self._queue.note(peer, session)

    def give(self, producers: Mapping[bytes, ProducerSession], now: float) -> list[bytes]:
        """Gives leases while there is room. Returns the producers that cannot be reached."""
        if now >= self._look_at_disk_at:
            self._look_at_disk_at = now + _LOOK_AT_DISK_EVERY_S
            self.disk.look()
        if not self.disk.has_room:
            return []
        if now >= self._refill_at:
            self._refill_at = now + _REFILL_EVERY_S
            self._queue.refill(producers.items())

        return give_leases(self.channel, self._queue, partial(self._give, now), self.clock)

    def _give(self, now: float, peer: bytes, session: ProducerSession) -> bool | None:
        record = self.buffer.lease(session.name, now=now, timeout_s=self.timeout_s)
        if record is None:
            return None
        lease_id, work = record.lease_id, record.work
        try:
            lease = Lease(lease_id, work.key.prompt_id, work.attempt, *self.prompts[work.key.prompt_id], self.sampling,
                          record.policy_floor, self.timeout_s)  # fmt: skip
            sent = self.channel.send(peer, lease)
        except (DatasetError, CodecError) as error:
            self.warn("bad_prompt", str(error))
            try:
                self.buffer.fail(lease_id, "bad_prompt", str(error), now)
            except JournalFullError:
                self.buffer.give_back(lease_id)
                return None
            return True
        session.leases.add(lease_id)
        return sent


@dataclass(eq=False)
class EvaluationDispatcher:
    """Gives no leases, and has an answer for those of the process before."""

    store: PolicyStore

    @property
    def policy(self) -> PolicyInfo | None:
        """The one that is evaluated now."""
        return None

    def tick(self, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Gives leases of what is due. Returns the producers that cannot be reached."""
        return []

    def receive(self, session: ProducerSession, message: Group | Nack) -> Ack | Nack | None:
        """The answer to what came of a lease of an evaluation, of this process or another; None: it needs none."""
        return Ack(message.lease_id, "duplicate", self.store.newest) if isinstance(message, Group) else None

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        """Takes back the leases of a producer, but those that it keeps, which are returned."""
        return set()
