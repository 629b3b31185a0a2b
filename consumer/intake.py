"""The trainer's I/O thread: it owns the sockets, lets producers in, leases prompts and takes groups.

Guarantee: every group is answered exactly once (Ack or Nack) per delivery; a producer that is silent for
`heartbeat_timeout_s` is given up and its leases go out again; nothing a peer sends ends the thread. Ticks are short, so
the thread never needs the main thread and the main thread never waits for it, except in `stop`.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from consumer.policy_shelf import PolicyShelf
from protocol.channel import BadFrame, ServerChannel
from protocol.codec import CodecError
from protocol.errors import DatasetError
from protocol.handshake import TrainerNeeds, problems
from protocol.messages import (
    Ack,
    BlobMissing,
    BlobRequest,
    Bye,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Nack,
    Policy,
    PolicyInfo,
    Reject,
    Sampling,
    Welcome,
)
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape, InvalidGroupError
from replay.ledger import UnknownLeaseError

logger = logging.getLogger(__name__)

TICK_S = 0.2
_FAREWELL_S = 5.0
_LEASES_PER_TICK = 256
_WARNINGS_PER_KIND = 5  # then one in a hundred


class PromptSource(Protocol):
    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """Prompt and columns of a row; raises DatasetError for one without a usable prompt."""
        ...


@dataclass
class ProducerSession:
    """One producer that said hello, as last heard of."""

    name: str
    capacity: int
    last_heard: float
    leases: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)  # leases that its last heartbeat did not name
    policy_version: int = -1


class Intake:
    """See the module's guarantee.

    Args:
        keep_blobs: adapter versions that producers can still download.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        channel: ServerChannel,
        buffer: RolloutBuffer,
        prompts: PromptSource,
        *,
        needs: TrainerNeeds,
        shape: GroupShape,
        sampling: Sampling,
        run_id: str,
        session: str,
        lease_timeout_s: float,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        keep_blobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._buffer = buffer
        self._prompts = prompts
        self._needs = needs
        self._shape = shape
        self._sampling = sampling
        self._run_id = run_id
        self._session = session
        self._lease_timeout_s = lease_timeout_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._clock = clock
        self._shelf = PolicyShelf(keep_blobs)
        self._announced: PolicyInfo | None = None
        self._producers: dict[bytes, ProducerSession] = {}
        self._tokens_seen: dict[str, int] = {}  # by producer, as last reported; outlives its sessions
        self._warned: Counter[str] = Counter()
        self._bye: Literal["finished", "stopping"] | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self.error: BaseException | None = None
        self.tokens_generated = 0  # by all producers, since this trainer started

    # Called by the main thread.

    def start(self) -> None:
        self._thread.start()

    def publish(self, version: int, data: bytes, digest: str) -> None:
        """Makes the adapter in `data` the current policy: announced, downloadable, and counted in every lease."""
        self._shelf.publish(version, data, digest)
        self._buffer.published(version)
        self._channel.wake()

    def wake(self) -> None:
        """The staleness budget may have changed: look for leases to give."""
        self._channel.wake()

    def stop(self, reason: Literal["finished", "stopping"], timeout_s: float = _FAREWELL_S + 5.0) -> None:
        """Says goodbye to every producer, closes the sockets and ends the thread."""
        self._bye = reason
        self._channel.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        if self.error is not None:
            raise self.error

    def describe(self) -> str:
        """Who waits for whom, in words."""
        sessions = list(self._producers.values())
        if not sessions:
            return "no producer is connected; start one with: rl-producer --config FILE"
        depth = self._buffer.depth()
        versions = sorted({session.policy_version for session in sessions})
        return (
            f"{len(sessions)} producer(s) on policy {', '.join(map(str, versions))}, {depth['leased']} leases out, "
            f"{depth['ready']} groups ready"
        )

    @property
    def num_producers(self) -> int:
        return len(self._producers)

    # The thread.

    def _run(self) -> None:
        try:
            while self._bye is None:
                self.tick(TICK_S)
            self._farewell(self._bye)
        except BaseException as error:
            self.error = error
        finally:
            self._channel.close()

    def _farewell(self, reason: Literal["finished", "stopping"]) -> None:
        """Says goodbye and waits for the same from every producer: ZeroMQ drops what a peer has not read when its
        connection ends, and a producer that missed the end of the run would wait for this trainer for ever."""
        for peer in self._producers:
            self._channel.send(peer, Bye(reason))
        deadline = time.monotonic() + _FAREWELL_S
        while self._producers and time.monotonic() < deadline:
            for peer, message in self._channel.poll(TICK_S):
                if isinstance(message, Bye):
                    self._producers.pop(peer, None)

    def tick(self, timeout_s: float) -> None:
        """One round: everything received, then everything due."""
        for peer, message in self._channel.poll(timeout_s):
            self._receive(peer, message)
        now = self._clock()
        for record in self._buffer.expire(now):
            self._warn("expired", f"lease {record.lease_id} of {record.producer} expired; its prompt goes out again")
            self._forget_lease(record.lease_id)
        for peer, session in list(self._producers.items()):
            if now - session.last_heard > self._heartbeat_timeout_s:
                self._lose(peer, f"silent for {now - session.last_heard:.1f} s")
        self._announce()
        self._give_leases(now)

    def _receive(self, peer: bytes, message: Message | BadFrame) -> None:
        if isinstance(message, BadFrame):
            self._buffer.counts["bad_frames"] += 1
            self._warn("bad_frame", f"refused a frame: {message.reason}")
            if message.peer_schema is not None:
                self._channel.send(peer, Reject([f"{message.reason}: install the same release on both sides"]))
            return
        if isinstance(message, BlobRequest):
            self._serve_blob(peer, message)
            return
        if isinstance(message, Hello):
            self._let_in(peer, message)
            return
        session = self._producers.get(peer)
        if session is None:
            if not isinstance(message, Bye):
                self._channel.send(peer, Bye("unknown_session"))
            return
        session.last_heard = self._clock()
        match message:
            case Group():
                self._take(peer, session, message)
            case Nack():
                self._take_failure(session, message)
            case Heartbeat():
                self._note(peer, session, message)
            case Bye():
                self._lose(peer, "it said goodbye")
            case _:
                self._buffer.counts["bad_frames"] += 1
                self._warn("bad_frame", f"{session.name} sent {type(message).__name__}, which only a trainer sends")

    def _let_in(self, peer: bytes, hello: Hello) -> None:
        former = self._producers.get(peer)
        if former is not None and former.name != hello.producer:
            self._lose(peer, f"it calls itself {hello.producer} now")
        found = problems(self._needs, hello.facts)
        if found:
            logger.warning("refused producer %s: %s", hello.producer, "; ".join(found))
            self._channel.send(peer, Reject(found))
            return
        for other, session in list(self._producers.items()):
            if session.name == hello.producer:
                del self._producers[other]
        self._buffer.release(hello.producer, keep=frozenset(hello.held))
        leases = self._buffer.leased_to(hello.producer)  # of those it holds, the ones that this trainer gave out
        self._producers[peer] = ProducerSession(hello.producer, hello.capacity, self._clock(), leases)
        logger.info("producer %s joined (up to %d groups at once)", hello.producer, hello.capacity)
        self._channel.send(peer, Welcome(self._run_id, self._session, self._shelf.newest, self._heartbeat_interval_s))

    def _take(self, peer: bytes, session: ProducerSession, message: Group) -> None:
        session.leases.discard(message.lease_id)
        try:
            if message.policy_version > self._shelf.newest.version:
                raise InvalidGroupError(f"policy version {message.policy_version} was never published")
            outcome = self._buffer.offer(self._shape.parse(message))
        except InvalidGroupError as error:
            self._warn("invalid", f"group {message.lease_id} of {session.name} is invalid: {error}")
            self._fail(message.lease_id, "invalid", str(error))
            self._channel.send(peer, Nack(message.lease_id, "invalid", str(error)))
        except UnknownLeaseError:
            self._buffer.counts["unknown_lease"] += 1
            self._channel.send(peer, Nack(message.lease_id, "unknown_lease", "not a lease of this trainer"))
        else:
            self._channel.send(peer, Ack(message.lease_id, outcome, self._shelf.newest))

    def _take_failure(self, session: ProducerSession, message: Nack) -> None:
        session.leases.discard(message.lease_id)
        if message.reason != "returned":
            self._warn(message.reason, f"{session.name} could not answer a prompt: {message.reason}: {message.detail}")
        self._fail(message.lease_id, message.reason, message.detail)

    def _fail(self, lease_id: str, reason: str, detail: str) -> None:
        try:
            self._buffer.fail(lease_id, reason, detail)
        except UnknownLeaseError:
            self._buffer.counts["unknown_lease"] += 1

    def _note(self, peer: bytes, session: ProducerSession, message: Heartbeat) -> None:
        before = self._tokens_seen.setdefault(session.name, message.tokens_generated)  # its first words after Welcome
        self.tokens_generated += max(0, message.tokens_generated - before)
        self._tokens_seen[session.name] = message.tokens_generated
        self._take_back_lost(session, frozenset(message.held))
        session.capacity = message.capacity
        session.policy_version = message.policy_version
        self._channel.send(peer, Policy(self._shelf.newest))

    def _take_back_lost(self, session: ProducerSession, held: frozenset[str]) -> None:
        """A lease that two heartbeats in a row do not name was lost, or its answer was (one may still be under way)."""
        absent = session.leases - held
        lost = absent & session.absent
        session.absent = absent - lost
        if lost:
            session.leases -= lost
            self._buffer.release(session.name, keep=frozenset(session.leases))
            self._warn("lost", f"{session.name} knows nothing of {len(lost)} leases; their prompts go out again")

    def _serve_blob(self, peer: bytes, request: BlobRequest) -> None:
        try:
            self._channel.send(peer, self._shelf.chunk(request))
        except CodecError as error:  # it asks for chunks that our max_message_bytes forbids
            self._warn("blob", f"a producer asks for too much at once (transport.blob_chunk_bytes): {error}")
            self._channel.send(peer, BlobMissing(request.digest))

    def _announce(self) -> None:
        policy = self._shelf.newest
        if policy is not self._announced:
            self._announced = policy
            for peer in self._producers:
                self._channel.send(peer, Policy(policy))

    def _give_leases(self, now: float) -> None:
        """One lease at a time to the producer with the most room, so that several share the work."""
        for _ in range(_LEASES_PER_TICK):
            if not self._producers:
                return
            peer, session = max(self._producers.items(), key=lambda entry: entry[1].capacity - len(entry[1].leases))
            if session.capacity <= len(session.leases):
                return
            record = self._buffer.lease(session.name, now=now, timeout_s=self._lease_timeout_s)
            if record is None:
                return
            try:
                prompt, columns = self._prompts[record.item.prompt_id]
                lease = Lease(
                    lease_id=record.lease_id,
                    prompt_id=record.item.prompt_id,
                    attempt=record.item.attempt,
                    prompt=prompt,
                    columns=columns,
                    sampling=self._sampling,
                    policy_floor=record.policy_floor,
                    timeout_s=self._lease_timeout_s,
                )
                sent = self._channel.send(peer, lease)
            except (DatasetError, CodecError) as error:
                self._warn("bad_prompt", str(error))
                self._fail(record.lease_id, "bad_prompt", str(error))
                continue
            session.leases.add(record.lease_id)
            if not sent:
                self._lose(peer, "it cannot be reached")
        self._channel.wake()  # there is more to give, after a look at what has arrived

    def _lose(self, peer: bytes, why: str) -> None:
        session = self._producers.pop(peer)
        released = self._buffer.release(session.name)
        logger.warning("producer %s left (%s); %d prompts go out again", session.name, why, len(released))

    def _forget_lease(self, lease_id: str) -> None:
        for session in self._producers.values():
            session.leases.discard(lease_id)

    def _warn(self, kind: str, text: str) -> None:
        """The first few of a kind, then one in a hundred."""
        self._warned[kind] += 1
        count = self._warned[kind]
        if count <= _WARNINGS_PER_KIND or count % 100 == 0:
            logger.warning("%s%s", text, f" ({count} of this kind so far)" if count > _WARNINGS_PER_KIND else "")
