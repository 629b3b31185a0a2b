"""Giving prompts to producers.

Guarantee: the producer with the most room gets the next lease, so that several share the work; a prompt that cannot be
sent fails alone; nothing is leased while the disk has no room for the groups that would come back.
"""

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from consumer.producers import ProducerSession
from protocol.channel import ServerChannel
from protocol.codec import CodecError
from protocol.errors import DatasetError
from protocol.messages import Lease, Sampling
from replay.buffer import RolloutBuffer
from replay.disk import DiskGuard
from replay.journal import JournalFullError
from replay.ledger import LeaseRecord

logger = logging.getLogger(__name__)

_LEASES_PER_TICK = 256
_LOOK_AT_DISK_EVERY_S = 1.0


class PromptSource(Protocol):
    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """Prompt and columns of a row; raises DatasetError for one without a usable prompt."""
        ...


class LeaseDesk:
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
            record = self._buffer.lease(session.name, now=now, timeout_s=self.timeout_s)
            if record is None:
                return problems, lost
            try:
                sent = self._channel.send(peer, self._message(record))
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

    def _message(self, record: LeaseRecord) -> Lease:
        prompt, columns = self._prompts[record.item.prompt_id]
        return Lease(
            lease_id=record.lease_id,
            prompt_id=record.item.prompt_id,
            attempt=record.item.attempt,
            prompt=prompt,
            columns=columns,
            sampling=self._sampling,
            policy_floor=record.policy_floor,
            timeout_s=self.timeout_s,
        )
