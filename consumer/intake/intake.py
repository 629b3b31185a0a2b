"""The trainer's I/O thread: it owns the sockets, lets producers in, leases prompts and takes groups.

Guarantee: a group is acknowledged after it is in the journal and never before, and every delivery of it is answered; a
producer that is silent for `heartbeat_timeout_s` is given up and its leases go out again; nothing a peer sends ends the
thread, an error of the journal does. Ticks are short, so the thread never needs the main thread and the main thread never
waits for it, except in `stop`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal

from consumer.intake.arrivals import Arrivals
from consumer.intake.dispatcher import LeaseDesk
from consumer.intake.evaluation import EvaluationLeases
from consumer.intake.farewell import FAREWELL_S, say_goodbye
from consumer.intake.sessions import FleetMember, ProducerSession
from consumer.publishing.policy_store import PolicyShelf
from protocol.files.shared_memory import NO_MEMORY, SharedMemory
from protocol.throttle import Throttle
from protocol.transport.channel import BadFrame, ServerChannel
from protocol.wire.codec import CodecError, encode
from protocol.wire.handshake import TrainerNeeds, problems
from protocol.wire.messages import (
    Ack,
    BlobMissing,
    BlobRequest,
    Bye,
    Group,
    Heartbeat,
    Hello,
    Nack,
    Policy,
    PolicyRequest,
    ProducerMessage,
    Reject,
    Welcome,
)
from protocol.wire.schemas import group_schema
from replay.batches.delivery import Delivery
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape, InvalidGroupError
from replay.journal.database import JournalFullError
from replay.journal.disk import DiskGuard
from replay.journal.writer import Journal
from replay.lease_ids import Key, is_evaluation
from replay.prompts.leases import LeaseRecord

logger = logging.getLogger(__name__)

TICK_S = 0.2


class Intake:
    """See the module's guarantee.

    Args:
        resumed: whether the run had a process before this one, whose leases producers may hold.
        keep_blobs: adapter versions that producers can still download.
        evaluations: None: there are none in this run.
        memory: for adapters that producers of this host read as files.
        beat: called in every round.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        channel: ServerChannel,
        buffer: RolloutBuffer,
        journal: Journal,
        disk: DiskGuard,
        desk: LeaseDesk,
        *,
        needs: TrainerNeeds,
        shape: GroupShape,
        run_id: str,
        session: str,
        resumed: bool,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        keep_blobs: int,
        evaluations: EvaluationLeases | None = None,
        memory: SharedMemory = NO_MEMORY,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._buffer = buffer
        self._disk = disk
        self._desk = desk
        self._needs = needs
        self._shape = shape
        self._run_id = run_id
        self._session = session
        self._resumed = resumed
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._evaluations = evaluations
        self._beat = beat
        self._clock = clock
        self._shelf = PolicyShelf(keep_blobs, memory)
        self._announced: Policy | None = None
        self._producers: dict[bytes, ProducerSession] = {}
        self._warn = Throttle(logger, clock)
        self._arrivals = Arrivals(channel, buffer, journal, disk, self._shelf, self._warn, clock)
        self._tokens_seen: dict[str, int] = {}  # by producer, as last reported; outlives its sessions
        self._refused: dict[str, int] = {}  # by producer, the version that it last said it refuses, or -1
        self._bye: Literal["finished", "stopping"] | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self.error: BaseException | None = None
        self.tokens_generated = 0  # by all producers, since this trainer started

    # Called by the main thread.

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """The staleness budget may have changed: look for leases to give."""
        self._channel.wake()

    def stop(self, reason: Literal["finished", "stopping"], timeout_s: float = FAREWELL_S + 5.0) -> None:
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
        now = self._clock()
        parts = [
            f"{len(sessions)} producer(s), {depth['leased']} leases out, {depth['ready']} groups ready, "
            f"newest policy v{self._shelf.newest.version}",
            *(session.describe(now) for session in sessions),
        ]
        if not self._disk.has_room:
            parts.append(
                f"no leases are given: the disk of run_dir is {self._disk.used:.0%} full (replay.max_disk_used)"
            )
        return "; ".join(parts)

    @property
    def num_producers(self) -> int:
        return len(self._producers)

    @property
    def num_unwritten(self) -> int:
        """Groups that wait for a commit."""
        return len(self._arrivals.waiting())

    @property
    def version(self) -> int:
        """The newest published policy's."""
        return self._shelf.newest.version

    def fleet(self) -> list[FleetMember]:
        """The connected producers."""
        now = self._clock()
        return [session.member(now) for session in list(self._producers.values())]

    # Called by the publisher's thread.

    def publish(
        self,
        version: int,
        data: bytes | memoryview,
        digest: str,
        probe: tuple[bytes, bytes] = (b"", b""),
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the adapter in `data` the current policy: announced, downloadable, and counted in every lease. The
        arguments are those of `PolicyShelf.publish`."""
        self._shelf.publish(version, data, digest, probe, release)
        self._buffer.published(version)
        self._channel.wake()

    # The thread.

    def _run(self) -> None:
        try:
            while self._bye is None:
                self._beat()
                self.tick(TICK_S)
            say_goodbye(
                self._channel, self._producers, self._bye,
                silence_s=self._heartbeat_timeout_s, beat=self._beat, clock=self._clock,
            )  # fmt: skip
        except BaseException as error:
            self.error = error
        finally:
            self._channel.close()

    def tick(self, timeout_s: float) -> None:
        """One round: everything received, then everything due. While it stands still (a slow disk), nobody is silent."""
        began = self._clock()
        for peer, message in self._channel.poll(timeout_s):
            try:
                self._receive(peer, message)
            except CodecError as error:
                self._warn("unanswerable", f"a message of a producer has no answer that can be sent: {error}")
            if self._arrivals.is_commit_due():
                self._arrivals.commit()
        self._arrivals.commit()
        now = self._clock()
        if (stood_still_s := now - began - timeout_s) > self._heartbeat_interval_s:
            for session in self._producers.values():
                session.last_heard = min(now, session.last_heard + stood_still_s)
        for record in self._buffer.expire(now):
            self._warn("expired", f"lease {record.lease_id} of {record.producer} expired; its prompt goes out again")
            for session in self._producers.values():
                session.leases.discard(record.lease_id)
        for peer, session in list(self._producers.items()):
            if now - session.last_heard > self._heartbeat_timeout_s:
                self._lose(peer, f"silent for {now - session.last_heard:.1f} s")
        self._announce()
        bad_prompts, unreachable = self._desk.give(self._producers.items(), now)
        for problem in bad_prompts:
            self._warn("bad_prompt", problem)
        if self._evaluations is not None:  # after training, which goes first
            unreachable += self._evaluations.tick(self._shelf, self._producers.items(), now)
        for peer in dict.fromkeys(unreachable):
            self._lose(peer, "it cannot be reached")

    def _receive(self, peer: bytes, message: ProducerMessage | BadFrame) -> None:
        if isinstance(message, BadFrame):
            self._refuse("bad_frames", f"refused a frame: {message.reason}", message.reason, message.frame)
            if message.peer_schema is not None:
                self._channel.send(peer, Reject([f"{message.reason}: install the same release on both sides"]))
            return
        if isinstance(message, BlobRequest):
            self._serve_blob(peer, message)
            return
        if isinstance(message, PolicyRequest):
            self._channel.send(peer, self._shelf.offer(message))
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
            case Group() | Nack() if is_evaluation(message.lease_id):
                if self._evaluations is not None:
                    self._evaluations.receive(peer, session, message, self._shelf)
                elif isinstance(message, Group):  # of a process before this one, which evaluates nothing
                    self._channel.send(peer, Ack(message.lease_id, "duplicate", self._shelf.newest))
            case Group():
                self._take(peer, session, message)
            case Nack():
                self._take_failure(session, message)
            case Heartbeat():
                self._note(peer, session, message)
            case Bye():
                self._lose(peer, "it said goodbye")

    def _refuse(self, count: str, warning: str, reason: str, frame: bytes) -> None:
        """Counts a frame that cannot be used, and keeps it for inspection (`rl-journal quarantine`)."""
        self._buffer.counts[count] += 1
        self._warn(count, warning)
        self._arrivals.quarantine(reason, frame)

    # Producers

    def _let_in(self, peer: bytes, hello: Hello) -> None:
        now = self._clock()
        former = self._producers.get(peer)
        if former is not None and former.name != hello.producer:
            self._lose(peer, f"it calls itself {hello.producer} now")
        found = problems(self._needs, hello.facts, hello.swap_mode)
        if found:
            self._warn("refused", f"refused producer {hello.producer}: {'; '.join(found)}")
            self._channel.send(peer, Reject(found))
            return
        for other, session in list(self._producers.items()):
            if session.name == hello.producer:
                del self._producers[other]
        self._release(hello.producer, keep=hello.held)
        leases = self._buffer.leased_to(hello.producer)
        evaluations = self._evaluations.release(hello.producer, keep=hello.held) if self._evaluations else set()
        of_this_run = hello.run_id == self._run_id if hello.run_id else self._resumed  # the release before names none
        answers = self._buffer.adopt(
            hello.producer,
            [lease_id for lease_id in hello.held if lease_id not in leases | evaluations],
            deadline=now + self._desk.timeout_s,
            of_this_run=of_this_run,
        )
        leases |= {lease_id for lease_id, wanted in answers.items() if wanted}
        leases -= self._arrivals.waiting()
        self._producers[peer] = ProducerSession(
            hello.producer, hello.capacity, now, leases, hello.release, hello.evaluates, evaluations, of_this_run
        )
        release = hello.release or "unknown"
        logger.info("producer %s joined (release %s, up to %d groups at once)", hello.producer, release, hello.capacity)
        self._channel.send(peer, Welcome(self._run_id, self._session, self._shelf.newest, self._heartbeat_interval_s))
        for lease_id, wanted in answers.items():
            if wanted is None:
                self._channel.send(peer, Ack(lease_id, "duplicate", self._shelf.newest))
            elif not wanted:
                self._channel.send(peer, Nack(lease_id, "unknown_lease", "its prompt is not wanted any more"))

    def _note(self, peer: bytes, session: ProducerSession, message: Heartbeat) -> None:
        before = self._tokens_seen.setdefault(session.name, message.tokens_generated)  # its first words after Welcome
        self.tokens_generated += max(0, message.tokens_generated - before)
        self._tokens_seen[session.name] = message.tokens_generated
        lost = session.note(message, self._heartbeat_interval_s)
        self._note_refusal(session.name, message)
        if lost:
            self._release(session.name, keep=session.leases | session.evaluations)
            self._warn("lost", f"{session.name} knows nothing of {len(lost)} leases; their prompts go out again")
        self._channel.send(peer, self._announcement())

    def _note_refusal(self, name: str, message: Heartbeat) -> None:
        """A version counts once for each producer that refuses it."""
        if message.refused_version not in (-1, self._refused.get(name)):
            self._buffer.counts["swaps_refused"] += 1
            logger.error("%s refuses policy v%d: %s", name, message.refused_version, message.refusal)
        self._refused[name] = message.refused_version

    def _lose(self, peer: bytes, why: str) -> None:
        session = self._producers.pop(peer)
        released = self._release(session.name)
        logger.warning("producer %s left (%s); %d prompts go out again", session.name, why, len(released))

    def _release(self, producer: str, keep: Iterable[str] = ()) -> list[LeaseRecord[Key]]:
        """Takes back the leases of a producer, but those that it keeps and those whose groups have arrived."""
        keep = frozenset(keep)
        if self._evaluations is not None:
            self._evaluations.release(producer, keep)
        return self._buffer.release(producer, self._clock(), keep=keep | self._arrivals.waiting())

    def _serve_blob(self, peer: bytes, request: BlobRequest) -> None:
        try:
            self._channel.send(peer, self._shelf.chunk(request))
        except CodecError as error:  # it asks for chunks that our max_message_bytes forbids
            self._warn("blob", f"a producer asks for too much at once (transport.blob_chunk_bytes): {error}")
            self._channel.send(peer, BlobMissing(request.digest))

    def _announcement(self) -> Policy:
        return Policy(self._shelf.newest, None if self._evaluations is None else self._evaluations.policy)

    def _announce(self) -> None:
        announcement = self._announcement()
        if announcement != self._announced:
            self._announced = announcement
            for peer in self._producers:
                self._channel.send(peer, announcement)

    # Groups

    def _take(self, peer: bytes, session: ProducerSession, message: Group) -> None:
        session.leases.discard(message.lease_id)
        newest = max(self._shelf.newest.version, self._buffer.newest_version)
        try:
            group = self._shape.parse(message)
            if group.newest_version > newest:
                raise InvalidGroupError(f"policy version {group.newest_version} was never published")
        except InvalidGroupError as error:
            warning = f"group {message.lease_id} of {session.name} is invalid: {error}"
            self._refuse("invalid", warning, warning, encode(message))
            self._end_lease(message.lease_id, "invalid", str(error))
            self._channel.send(peer, Nack(message.lease_id, "invalid", str(error)))
            return
        schema = group_schema(*(name for name in ("token_versions", "sampled", "episodes") if getattr(message, name)))
        frame = encode(message, schema_version=schema)
        self._arrivals.add(peer, Delivery(group, frame, session.name, session.of_this_run))

    def _take_failure(self, session: ProducerSession, message: Nack) -> None:
        session.leases.discard(message.lease_id)
        if message.reason == "returned":
            self._buffer.give_back(message.lease_id)
            return
        self._warn(message.reason, f"{session.name} could not answer a prompt: {message.reason}: {message.detail}")
        self._end_lease(message.lease_id, message.reason, message.detail)

    def _end_lease(self, lease_id: str, reason: str, detail: str) -> None:
        """On a full disk a lease may stay; it ends with the first round that finds room (`RolloutBuffer.expire`)."""
        with contextlib.suppress(JournalFullError):
            self._buffer.fail(lease_id, reason, detail, self._clock())
