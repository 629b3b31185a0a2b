"""Giving prompts to producers, and comparing the tokens that they make of them with those that the trainer makes.

Guarantee: a prompt that cannot be sent fails alone; no prompt is leased while the disk has no room for the groups that would come
back. Prompts go out in the order in which the ledger leases them. Of each producer the first group that answers a prompt in a
single turn is compared, and then one of some `EVERY` leases. A difference is told in words, and the group is trained as it was
sampled: a chat template that writes the date makes other tokens at another time. No proof of a swap sees a difference, because
probes are token ids.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from consumer.link.sessions import ProducerSession, RoomQueue, give_leases
from consumer.prompts.completion_limit import CompletionLimit
from protocol.channel.channel import ReceivedGroup, ServerChannel
from protocol.errors import DatasetError
from protocol.wire.codec import CodecError
from protocol.wire.messages import Ack, Group, Lease, Nack, PolicyInfo, Sampling
from replay.buffer import RolloutBuffer
from replay.journal.retention import DiskGuard
from replay.journal.writer import JournalFullError

EVERY = 256
_MOST_NOTED = 64  # leases of one producer


@dataclass(frozen=True)
class PromptCheck:
    """The check of all producers. `tokens_of` makes token ids of a prompt; it may raise what a chat template raises."""

    tokens_of: Callable[[Any], Sequence[int]]

    def note(self, session: ProducerSession, lease_id: str, prompt: Any) -> None:
        """Note a lease that was given to a producer, if it is time to compare one."""
        session.leases_to_comparison -= 1
        if session.leases_to_comparison > 0:
            return
        session.noted_prompts[lease_id] = prompt
        if len(session.noted_prompts) > _MOST_NOTED:
            del session.noted_prompts[next(iter(session.noted_prompts))]

    def difference(self, session: ProducerSession, group: Group) -> str | None:
        """Return how the prompt's tokens differ from the trainer's; None if they are the same, or are not to be compared."""
        if group.lease_id not in session.noted_prompts:
            return None
        prompt = session.noted_prompts[group.lease_id]
        session.noted_prompts.clear()
        session.leases_to_comparison = EVERY
        try:
            own = np.array(self.tokens_of(prompt), "<i4")
        except Exception as error:  # a chat template raises what it likes
            return f"the trainer cannot make tokens of a prompt that it answered: {type(error).__name__}: {error}"
        if own.tobytes() == group.prompt_ids:
            return None
        theirs = np.frombuffer(group.prompt_ids[: len(group.prompt_ids) // 4 * 4], "<i4")
        length = min(len(own), len(theirs))
        first = int(np.argmax(np.append(own[:length] != theirs[:length], True)))
        return (
            f"it makes {len(theirs)} tokens of a prompt of which the trainer makes {len(own)}, and number {first} is the first "
            "to differ: give both the same tokenizer, chat template and release of transformers (a template that writes the "
            "date may differ by itself)"
        )


_LOOK_AT_DISK_EVERY_S = 1.0
_REFILL_EVERY_S = 0.05


class Prompts(Protocol):
    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """Return the prompt and the columns of its row. Raises DatasetError for a row without a usable prompt."""
        ...


class Evaluations(Protocol):
    """The giver of leases of evaluations (`consumer.evaluate.leases`)."""

    @property
    def policy(self) -> PolicyInfo | None:
        """The policy that is evaluated now."""

    def tick(self, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Give leases of the version that is due. Return the producers that cannot be reached."""

    def receive(self, session: ProducerSession, message: ReceivedGroup | Nack) -> Ack | Nack | None:
        """Return the answer to what a producer made of a lease; None: it needs none."""

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        """Take back the leases of a producer, but those that it keeps, which are returned."""


@dataclass(eq=False)
class LeaseDispatcher:
    """The giver of prompts to producers. `warn` logs a problem, by kind."""

    channel: ServerChannel
    buffer: RolloutBuffer
    prompts: Prompts
    disk: DiskGuard
    sampling: Sampling
    timeout_s: float
    warn: Callable[[str, str], Any]
    clock: Callable[[], float] = time.monotonic
    evaluations: Evaluations | None = None
    limit: CompletionLimit | None = None  # of a row's completions; None: that of `sampling`
    prompt_check: PromptCheck | None = None  # None: prompts are not the trainer's, or are played in turns
    _queue: RoomQueue = field(init=False)
    _refill_at: float = -math.inf
    _capacity: int = 0  # of all producers
    _look_at_disk_at: float = 0.0

    def __post_init__(self) -> None:
        self._queue = RoomQueue(self._room)

    def requeue(self, peer: bytes, session: ProducerSession) -> None:
        """Call when a producer may have more free slots."""
        self._queue.note(peer, session)

    def give(self, producers: Mapping[bytes, ProducerSession], now: float) -> list[bytes]:
        """Give leases while there is room, for training first. Return the producers that cannot be reached."""
        if now >= self._look_at_disk_at:
            self._look_at_disk_at = now + _LOOK_AT_DISK_EVERY_S
            self.disk.check()
        lost = list[bytes]()
        if self.disk.has_room:
            if now >= self._refill_at:
                self._refill_at = now + _REFILL_EVERY_S
                self._queue.refill(producers.items())
                self._capacity = sum(session.capacity for session in producers.values())
            lost += give_leases(self.channel, self._queue, partial(self._give, now), self.clock)
        if self.evaluations is not None:
            lost += self.evaluations.tick(producers.items(), now)
        return lost

    def check_prompt(self, session: ProducerSession, group: Group) -> None:
        """Count and log a difference between the prompt's tokens of a group and the trainer's."""
        if self.prompt_check is not None and (problem := self.prompt_check.difference(session, group)):
            self.buffer.totals["prompts_differ"] += 1
            self.warn("prompts_differ", f"producer {session.name}: {problem}")

    def _room(self, session: ProducerSession) -> float:
        """Return the free share of the leases that a producer takes: none if it refuses for good what the next one needs."""
        hopeless = session.heartbeat.num_refused > 0 and not session.may_serve(self.buffer.next_floor())
        return 0.0 if hopeless or not session.capacity else session.room / session.capacity

    def _give(self, now: float, peer: bytes, session: ProducerSession) -> bool | None:
        serves = session.heartbeat.policy_version if session.heartbeat.num_refused else None
        record = self.buffer.lease(
            session.name, now=now, timeout_s=self.timeout_s, serves=serves, capacity=self._capacity
        )
        if record is None:
            return None
        lease_id, work = record.lease_id, record.task
        try:
            prompt, columns = self.prompts[work.key.prompt_id]
            sampling = self.sampling if self.limit is None else self.limit.within(self.sampling, columns)
            lease = Lease(lease_id, work.key.prompt_id, work.attempt, prompt, columns, sampling, record.policy_floor,
                          self.timeout_s)  # fmt: skip
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
        if self.prompt_check is not None:
            self.prompt_check.note(session, lease_id, lease.prompt)
        return sent
