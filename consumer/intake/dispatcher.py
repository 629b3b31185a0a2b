"""Giving prompts to producers.

Guarantee: the producer with the most room gets the next lease, so that several share the work; a prompt that cannot be
sent fails alone; nothing is leased while the disk has no room for the groups that would come back. Prompts go out in the order
in which the ledger leases them. Where reading one takes time, as with a user's transform, a few more are leased to nobody and
read meanwhile, as far as producers have room: they wait for those before them, and nothing else waits.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from consumer.intake.sessions import ProducerSession
from consumer.prompts.source import Prompt, PromptSource
from protocol.errors import DatasetError
from protocol.transport.channel import ServerChannel
from protocol.wire.codec import CodecError
from protocol.wire.messages import Lease, Sampling
from replay.buffer import RolloutBuffer
from replay.journal.database import JournalFullError
from replay.journal.disk import DiskGuard
from replay.lease_ids import Key
from replay.prompts.leases import LeaseRecord

logger = logging.getLogger(__name__)

_LEASES_PER_TICK = 256
_READ_AHEAD = 32  # leases
_NOBODY = ""
_LOOK_AT_DISK_EVERY_S = 1.0


@dataclass
class _Unsent:
    """A lease that no producer has yet."""

    record: LeaseRecord[Key]
    prompt: Prompt | DatasetError | None  # None: it is being read


class LeaseDispatcher:
    """See the module's guarantee."""

    def __init__(
        self,
        channel: ServerChannel,
        buffer: RolloutBuffer,
        prompts: PromptSource,
        disk: DiskGuard,
        *,
        sampling: Sampling,
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._buffer = buffer
        self._prompts = prompts
        self._disk = disk
        self._sampling = sampling
        self.timeout_s = timeout_s
        self._unsent: deque[_Unsent] = deque()
        self._look_at_disk_at = 0.0
        self._had_room = True

    def give(self, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> tuple[list[str], list[bytes]]:
        """Gives leases while there is room, a limited number at a time.

        Returns:
            What was wrong with prompts that could not be sent, and the producers that cannot be reached.
        """
        self._look_at_disk(now)
        reachable = dict(producers)
        problems: list[str] = []
        lost: list[bytes] = []
        for _ in range(_LEASES_PER_TICK):
            if not reachable or not self._disk.has_room:
                return problems, lost
            peer, session = max(reachable.items(), key=lambda entry: entry[1].room)
            if session.room <= 0:
                return problems, lost
            unsent = self._next(sum(max(0, each.room) for each in reachable.values()), now)
            if unsent is None:
                return problems, lost
            record = unsent.record
            if not self._buffer.hand_over(record.lease_id, session.name, deadline=now + self.timeout_s):
                continue
            try:
                sent = self._channel.send(peer, self._message(unsent))
            except (DatasetError, CodecError) as error:
                problems.append(str(error))
                try:
                    self._buffer.fail(record.lease_id, "bad_prompt", str(error), now)
                except JournalFullError:
                    self._buffer.give_back(record.lease_id)
                    return problems, lost
                continue
            session.leases.add(record.lease_id)
            if not sent:
                lost.append(peer)
                del reachable[peer]
        self._channel.wake()  # there is more to give, after a look at what has arrived
        return problems, lost

    def _look_at_disk(self, now: float) -> None:
        if now < self._look_at_disk_at:
            return
        self._look_at_disk_at = now + _LOOK_AT_DISK_EVERY_S
        self._disk.look()
        if self._disk.has_room is not self._had_room:
            self._had_room = self._disk.has_room
            full = f"the disk of run_dir is {self._disk.used:.0%} full"
            if self._disk.has_room:
                logger.info("%s: leases are given again", full)
            else:
                logger.warning("%s: no leases until there is room (replay.max_disk_used)", full)

    def _next(self, room: int, now: float) -> _Unsent | None:
        """The next lease; None if there is none, or its prompt is being read. Then others are read meanwhile."""
        for unsent in self._unsent:
            if unsent.prompt is None:
                unsent.prompt = self._read(unsent.record)
        while len(self._unsent) < min(room, _READ_AHEAD) and not (self._unsent and self._unsent[0].prompt):
            record = self._buffer.lease(_NOBODY, now=now, timeout_s=math.inf)
            if record is None:
                break
            self._unsent.append(_Unsent(record, self._read(record)))
        return self._unsent.popleft() if self._unsent and self._unsent[0].prompt else None

    def _read(self, record: LeaseRecord[Key]) -> Prompt | DatasetError | None:
        try:
            return self._prompts[record.work.key.prompt_id]
        except DatasetError as error:
            return error

    def _message(self, unsent: _Unsent) -> Lease:
        record = unsent.record
        if isinstance(unsent.prompt, DatasetError):
            raise unsent.prompt
        assert unsent.prompt is not None
        prompt, columns = unsent.prompt
        return Lease(
            lease_id=record.lease_id,
            prompt_id=record.work.key.prompt_id,
            attempt=record.work.attempt,
            prompt=prompt,
            columns=columns,
            sampling=self._sampling,
            policy_floor=record.policy_floor,
            timeout_s=self.timeout_s,
        )
