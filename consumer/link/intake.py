"""The trainer's I/O thread: it owns the sockets, receives what producers send and has everything answered that is due.

Guarantee: a group is acknowledged after it is in the journal and never before, and every delivery of it is answered; nothing a
peer sends ends the thread, an error of the journal does. Ticks are short, so the thread never needs the main thread and the
main thread never waits for it, except in `stop`.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from consumer.link.commit_queue import CommitQueue, RolloutStorage
from consumer.link.dispatcher import LeaseDispatcher
from consumer.link.fleet import Fleet, SessionTerms
from consumer.link.policy_store import PolicyStore, PublishedPolicy
from consumer.link.sessions import FAREWELL_S, ProducerSession, say_goodbye
from consumer.waiting import ThreadErrors
from protocol.channel.channel import BadFrame, ReceivedGroup, ServerChannel
from protocol.config.functions import installed_plugin
from protocol.runtime.logs import Throttle
from protocol.wire.codec import CodecError
from protocol.wire.messages import (
    Ack,
    BlobMissing,
    BlobRequest,
    BundleRequest,
    Bye,
    Group,
    Heartbeat,
    Hello,
    Nack,
    PolicyOffer,
    PolicyRequest,
    ProducerMessage,
    Reject,
)
from replay.lease_ids import is_evaluation

logger = logging.getLogger(__name__)

TICK_S = 0.2
_MOST_DESCRIBED = 8  # producers


class RelayDirectory(Protocol):
    """The relays that are named to producers, as the entry point `directory` of the group `slipstream.relays` knows them."""

    def refresh(self, now: float, sessions: Mapping[bytes, ProducerSession]) -> None:
        """Find them, a few times a second."""

    def with_relays(
        self, offer: PolicyOffer, session: ProducerSession, now: float, sessions: Mapping[bytes, ProducerSession]
    ) -> PolicyOffer:
        """Return the offer of the newest policy, or of its anchor, to this producer, with the relays that it is to ask first."""


class Intake:
    """The I/O thread. Any thread may read the numbers of its parts. `errors` gets the error that ended the thread;
    `beat` is called in every round, with the clock in monotonic seconds."""

    def __init__(
        self,
        channel: ServerChannel,
        storage: RolloutStorage,
        dispatcher: LeaseDispatcher,
        store: PolicyStore,
        terms: SessionTerms,
        errors: ThreadErrors,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._buffer, _, self._disk = storage
        self._dispatcher = dispatcher
        self._errors = errors
        self._beat = beat
        self._warn = warn = Throttle(logger, clock)
        self.store = store
        self.clock = clock
        self.commits = CommitQueue(channel, storage, store, terms.shape, warn, clock)
        self.fleet = Fleet(channel, self._buffer, self.commits, store, dispatcher.evaluations, terms, clock, warn)
        directory = installed_plugin("slipstream.relays", "directory")
        self._relays: RelayDirectory | None = directory and directory(channel, terms.host, terms.region)
        self._bye: Literal["finished", "stopping"] | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    # Called by the main thread.

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for leases to give, because the staleness budget may have changed."""
        self._channel.wake()

    def stop(self, reason: Literal["finished", "stopping"], timeout_s: float = FAREWELL_S + 5.0) -> None:
        """Say goodbye to every producer, close the sockets and end the thread."""
        self._bye = reason
        self._channel.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check_refused(self, oldest_usable: int | None = None) -> None:
        """Raise PolicyRefusedError if no producer is left that serves what is needed (`RefusalWatch.check`)."""
        sessions = list(self.fleet.sessions.values())
        self.fleet.terms.refusals.check(sessions, self.store.newest.version, oldest_usable)

    def describe(self) -> str:
        """Return which side waits for which, in words."""
        sessions = list(self.fleet.sessions.values())
        if not sessions:
            return "no producer is connected; start one with: rl-producer --config FILE"
        depth = self._buffer.depth()
        now = self.clock()
        parts = [
            f"{len(sessions)} producer(s), {depth['leased']} leases out, {depth['ready']} groups ready, "
            f"newest policy v{self.store.newest.version}",
            *(session.describe(now) for session in sessions[:_MOST_DESCRIBED]),
        ]
        if len(sessions) > _MOST_DESCRIBED:
            parts.append(f"and {len(sessions) - _MOST_DESCRIBED} more producers")
        if not self._disk.has_room:
            parts.append(
                f"no leases are given: the disk of run_dir is {self._disk.used:.0%} full (replay.max_disk_used)"
            )
        return "; ".join(parts)

    # Called by the publisher's thread.

    def publish(self, policy: PublishedPolicy) -> None:
        """Make this the current policy: announced, downloadable, and counted in every lease."""
        self.store.publish(policy)
        self._buffer.published(policy.version)
        self._channel.wake()

    # The thread.

    def _run(self) -> None:
        try:
            while self._bye is None:
                self._beat()
                self.tick(TICK_S)
            say_goodbye(
                self._channel, self.fleet.sessions, self._bye,
                silence_s=self.fleet.terms.heartbeat_timeout_s, beat=self._beat, clock=self.clock,
            )  # fmt: skip
        except BaseException as error:
            self._errors.note(error)
        finally:
            self._channel.close()

    def tick(self, timeout_s: float) -> None:
        """Take one round: everything received, then everything due. While it stands still (a slow disk), no producer counts as
        silent."""
        began = self.clock()
        for peer, message in self._channel.poll(timeout_s):
            try:
                self._receive(peer, message)
            except CodecError as error:
                self._warn("unanswerable", f"a message of a producer has no answer that can be sent: {error}")
            if self.commits.is_commit_due():
                self.commits.commit()
        self.commits.commit()
        now = self.clock()
        for record in self._buffer.expire(now):
            self._warn("expired", f"lease {record.lease_id} of {record.producer} expired; its prompt goes out again")
            self.fleet.forget(record.producer, record.lease_id)
        self.fleet.note_disconnected(self._channel.disconnected(), now)
        self.fleet.lose_silent(now, stood_still_s=now - began - timeout_s)
        self.fleet.announce()
        sessions = self.fleet.sessions
        if self._relays is not None:
            self._relays.refresh(now, sessions)
        for peer in dict.fromkeys(self._dispatcher.give(sessions, now)):
            self.fleet.lose(peer, "it cannot be reached")

    def _receive(self, peer: bytes, message: ProducerMessage | ReceivedGroup | BadFrame) -> None:
        session = self.fleet.sessions.get(peer)
        if session is not None:
            session.last_heard = self.clock()
        match message:
            case BadFrame(reason, peer_schema, frame):
                self.commits.refuse("bad_frames", f"refused a frame: {reason}", reason, frame)
                if peer_schema is not None:
                    self._channel.send(peer, Reject([f"{reason}: install the same release on both sides"]))
            case BlobRequest():
                self._serve_blob(peer, message)
            case BundleRequest():
                self._channel.send(peer, self.fleet.terms.bundle.answer)
            case PolicyRequest():
                self._channel.send(peer, self._offer(peer, message))
            case Hello():
                self.fleet.join(peer, message)
            case _ if session is None:
                if not isinstance(message, Bye):
                    self._channel.send(peer, Bye("unknown_session"))
            case ReceivedGroup(Group(lease_id)) | Nack(lease_id) if is_evaluation(lease_id):
                self._receive_evaluated(peer, session, message)
            case ReceivedGroup():
                self._dispatcher.check_prompt(session, message.message)
                self.commits.take(peer, session, message)
            case Nack():
                self.commits.take_failure(session, message)
            case Heartbeat():
                self.fleet.note(peer, session, message)
            case Bye():
                self.fleet.num_goodbyes += 1
                self.fleet.lose(peer, "it said goodbye")
        if (session := self.fleet.sessions.get(peer)) is not None:
            self._dispatcher.requeue(peer, session)

    def _receive_evaluated(self, peer: bytes, session: ProducerSession, message: ReceivedGroup | Nack) -> None:
        answer: Ack | Nack | None = None
        if self._dispatcher.evaluations is not None:
            answer = self._dispatcher.evaluations.receive(session, message)
        elif isinstance(message, ReceivedGroup):  # of a process before, which evaluated
            answer = Ack(message.message.lease_id, "duplicate", self.store.newest)
        if answer is not None:
            self._channel.send(peer, answer)

    def _offer(self, peer: bytes, request: PolicyRequest) -> PolicyOffer | BlobMissing:
        offer, session = self.store.offer(request), self.fleet.sessions.get(peer)
        if self._relays is None or session is None:
            return offer
        if isinstance(offer, PolicyOffer) and self.store.is_newest(offer.digest):
            return self._relays.with_relays(offer, session, self.clock(), self.fleet.sessions)
        return offer

    def _serve_blob(self, peer: bytes, request: BlobRequest) -> None:
        try:
            self._channel.send(peer, self.fleet.terms.bundle.chunk(request) or self.store.chunk(request))
        except CodecError as error:  # it asks for chunks that our max_message_bytes forbids
            self._warn("blob", f"a producer asks for too much at once (transport.blob_chunk_bytes): {error}")
            self._channel.send(peer, BlobMissing(request.digest))
