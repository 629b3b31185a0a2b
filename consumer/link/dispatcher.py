"""Giving prompts to producers.

Guarantee: a prompt that cannot be sent fails alone; nothing is leased while the disk has no room for the groups that would come
back. Prompts go out in the order in which the ledger leases them. Where reading one takes time, as with a user's transform, a few
more are leased to nobody and read meanwhile, as far as producers have room: they wait for those before them, and nothing else
waits.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from consumer.link.policy_store import PolicyStore
from consumer.link.sessions import ProducerSession, RoomQueue, give_leases
from consumer.prompts.source import Prompt, PromptSource
from protocol.channel.channel import ServerChannel
from protocol.errors import DatasetError
from protocol.wire.codec import CodecError
from protocol.wire.messages import Ack, Group, Lease, Nack, PolicyInfo, Sampling
from replay.buffer import RolloutBuffer
from replay.journal.database import JournalFullError
from replay.journal.disk import DiskGuard
from replay.lease_ids import Key
from replay.prompts.leases import LeaseRecord

_READ_AHEAD = 32  # leases
_NOBODY = ""
_LOOK_AT_DISK_EVERY_S = 1.0
_REFILL_EVERY_S = 0.05


def read(prompts: PromptSource, prompt_id: int) -> Prompt | DatasetError | None:
    """The prompt, or what is wrong with it; None: it is being read."""
    try:
        return prompts[prompt_id]
    except DatasetError as error:
        return error


@dataclass
class _Unsent:
    """A lease that no producer has yet."""

    record: LeaseRecord[Key]
    prompt: Prompt | DatasetError | None  # None: it is being read


@dataclass(eq=False)
class LeaseDispatcher:
    """See the module's guarantee. `warn` is told of what went wrong, by kind."""

    channel: ServerChannel
    buffer: RolloutBuffer
    prompts: PromptSource
    disk: DiskGuard
    sampling: Sampling
    timeout_s: float
    warn: Callable[[str, str], Any]
    clock: Callable[[], float] = time.monotonic
    _queue: RoomQueue = field(default_factory=lambda: RoomQueue(lambda session: session.room))
    _refill_at: float = -math.inf
    _unsent: deque[_Unsent] = field(default_factory=deque)
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
        unsent = self._next(session.room + self._queue.at_most, now)
        if unsent is None:
            return None
        record, prompt = unsent.record, unsent.prompt
        lease_id, work = record.lease_id, record.work
        if not self.buffer.hand_over(lease_id, session.name, deadline=now + self.timeout_s):
            return True
        try:
            if isinstance(prompt, DatasetError):
                raise prompt
            assert prompt is not None
            lease = Lease(lease_id, work.key.prompt_id, work.attempt, *prompt, self.sampling,
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

    def _next(self, room: int, now: float) -> _Unsent | None:
        """The next lease, within the room of the producers; None if there is none, or its prompt is being read. Then others are
        read meanwhile."""
        for unsent in self._unsent:
            if unsent.prompt is None:
                unsent.prompt = read(self.prompts, unsent.record.work.key.prompt_id)
        while len(self._unsent) < min(room, _READ_AHEAD) and not (self._unsent and self._unsent[0].prompt):
            record = self.buffer.lease(_NOBODY, now=now, timeout_s=math.inf)
            if record is None:
                break
            self._unsent.append(_Unsent(record, read(self.prompts, record.work.key.prompt_id)))
        return self._unsent.popleft() if self._unsent and self._unsent[0].prompt else None


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
