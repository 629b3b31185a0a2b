"""The producer's side of the wire: one thread that owns the channel.

Guarantee: the trainer learns of every lease's fate: a finished group is kept and sent again until the trainer settles it,
also when that is another process of the same run; a failed lease is refused once. Only another run voids what is held. A
trainer that falls silent is noticed within `heartbeat_timeout_s` and waited for, visibly.

    connecting --Hello--> greeting --Welcome--> connected --silence, Bye--> connecting
                             |                      |
                           Reject              Bye(finished)          -> the thread ends and reports why
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from producer.connection import REMIND_EVERY_S, Connection
from producer.download import PolicyDownload
from producer.interfaces import Counters, Delivery, Identity, LinkEvents, Workload
from producer.outbox import Outbox
from producer.sender import Sender
from protocol.channel import BadFrame, ClientChannel
from protocol.config import TransportSection
from protocol.errors import IncompatiblePeerError
from protocol.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    Bye,
    Group,
    Hello,
    Lease,
    Nack,
    Policy,
    Reject,
    TrainerMessage,
    Welcome,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.1


class Link(threading.Thread):
    """Start it once; `answer` and `stop` may be called from any thread."""

    def __init__(
        self,
        channel: ClientChannel,
        identity: Identity,
        transport: TransportSection,
        endpoint: str,
        events: LinkEvents,
        counters: Counters,
        workload: Callable[[], Workload],
    ) -> None:
        super().__init__(name="link", daemon=True)
        self._channel = channel
        self._identity = identity
        self._timeout_s = transport.heartbeat_timeout_s
        self._events = events
        self._counters = counters

        self._answers: queue.SimpleQueue[Group | Nack] = queue.SimpleQueue()
        self._stop_by: float | None = None
        self._closing = threading.Lock()
        self._closed = False

        self._connection = Connection(endpoint, transport.heartbeat_timeout_s)
        self._outbox = Outbox(transport.max_unacked_bytes)
        self._was_full = False
        self._download = PolicyDownload(transport.blob_chunk_bytes)
        self._sender = Sender(channel, self._outbox, self._download, identity, counters, workload)
        self._run_id = self._session = ""
        self._last_bad_frame_at = float("-inf")

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def delivery(self) -> Delivery:
        """Read by another thread: each number is true, but not all at the same moment."""
        box, heard_ago_s = self._outbox, self._connection.heard_ago_s(time.monotonic())
        return Delivery(self.connected, heard_ago_s, box.num_held, box.num_groups, box.num_bytes, box.full)

    def answer(self, message: Group | Nack) -> None:
        """Settles a lease from this side. Never blocks."""
        self._answers.put(message)
        self._wake()

    def stop(self, flush_s: float) -> None:
        """Ends the thread after at most `flush_s` spent on delivering what is finished."""
        self._stop_by = time.monotonic() + flush_s
        self._wake()

    def _wake(self) -> None:
        with self._closing:
            if not self._closed:
                self._channel.wake()

    def run(self) -> None:
        error: BaseException | None = None
        try:
            self._connection.await_trainer(time.monotonic())
            while not self._step():
                pass
        except BaseException as problem:
            error = problem
        with self._closing:
            self._closed = True
            self._channel.close()
        self._events.ended(error)

    def _step(self) -> bool:
        """One round: say what is due, listen briefly. Returns True when the thread has nothing more to do."""
        now = time.monotonic()
        self._take_answers()
        self._note_fullness()
        if self._stop_by is not None and (self._outbox.all_settled or not self.connected or now >= self._stop_by):
            if self._outbox.num_groups:
                logger.warning("%d finished groups were not acknowledged and are lost", self._outbox.num_groups)
            self._say_goodbye()
            return True
        if self._connection.is_silent(now):
            self._lose(f"the trainer has been silent for {self._timeout_s:g} s")
        if self.connected:
            self._sender.send_due(now)
        else:
            self._greet(now)
        for message in self._channel.poll(_TICK_S):
            self._connection.note_message(time.monotonic())
            if isinstance(message, BadFrame):
                self._refuse(message)
            elif self._receive(message):
                return True
        return False

    # Connecting

    def _greet(self, now: float) -> None:
        self._connection.remind(now)
        if self._connection.hello_unanswered(now):
            self._reconnect()
        if self._connection.hello_due(now):
            hello = Hello(self._identity.name, self._identity.facts, self._identity.capacity, self._outbox.held())
            if self._channel.send(hello):
                self._connection.note_hello(now)

    def _lose(self, reason: str) -> None:
        if self.connected:
            self._connection.await_trainer(time.monotonic(), reason)
        self._reconnect()

    def _reconnect(self) -> None:
        self._channel.reset()
        self._connection.start_over(time.monotonic())

    def _say_goodbye(self) -> None:
        if self.connected:
            self._channel.send(Bye("stopping"))

    # Answering

    def _take_answers(self) -> None:
        while not self._answers.empty():
            self._outbox.finish(self._answers.get_nowait())

    def _note_fullness(self) -> None:
        full = self._outbox.full
        if full != self._was_full:
            self._was_full = full
            waiting = f"{self._outbox.num_groups} groups ({self._outbox.num_bytes} bytes) wait for acknowledgement"
            logger.info("generation %s: %s (transport.max_unacked_bytes)", "pauses" if full else "resumes", waiting)
            self._events.outbox_full(full)

    # Receiving

    def _refuse(self, frame: BadFrame) -> None:
        if frame.peer_schema is not None:
            raise IncompatiblePeerError(f"{frame.reason}: install the same release of slipstream on both sides")
        now = time.monotonic()
        if now - self._last_bad_frame_at >= REMIND_EVERY_S:
            self._last_bad_frame_at = now
            logger.warning("a frame from the trainer was refused: %s", frame.reason)

    def _receive(self, message: TrainerMessage) -> bool:
        """Returns True when the trainer has finished."""
        match message:
            case Welcome():
                self._begin_session(message)
            case Reject(problems):
                raise IncompatiblePeerError("the trainer refused this producer:\n  " + "\n  ".join(problems))
            case Bye("finished"):
                logger.info("the trainer has finished")
                self._say_goodbye()
                return True
            case Bye(reason):
                self._say_goodbye()
                self._lose(f"the trainer {'is stopping' if reason == 'stopping' else 'does not know this session'}")
            case _ if not self.connected:
                pass  # left over from before the reset
            case Lease(lease_id):
                if self._outbox.begin(lease_id):
                    self._events.leased(message)
            case Ack(lease_id):
                self._counters.settled += self._outbox.settle(lease_id)
                self._download.announce(message.policy)
            case Policy(policy):
                self._download.announce(policy)
            case Nack():
                self._drop(message)
            case BlobChunk():
                arrived = self._download.receive(message)
                if arrived is not None:
                    self._events.policy_arrived(*arrived)
            case BlobMissing(digest):
                self._download.give_up(digest)
        return False

    def _begin_session(self, welcome: Welcome) -> None:
        if welcome.run_id != self._run_id:
            if count := self._outbox.void():
                logger.warning("the trainer of another run: %d leases of run %s are void", count, self._run_id)
            self._counters.abandoned += count
            self._download.forget_policy()
            self._events.run_began(welcome.policy)
        elif welcome.session != self._session:
            logger.info("another process of the same run: %d leases go on", self._outbox.num_held)
            self._download.forget_policy()
            self._events.session_began(welcome.policy)
        logger.info("connected to the trainer of run %s (policy v%d)", welcome.run_id, welcome.policy.version)
        self._run_id, self._session = welcome.run_id, welcome.session
        self._connection.note_welcome()
        self._sender.start_over(welcome.heartbeat_interval_s)
        self._download.announce(welcome.policy)

    def _drop(self, nack: Nack) -> None:
        if self._outbox.abandon(nack.lease_id):
            self._counters.abandoned += 1
            self._events.abandoned(nack.lease_id)
        elif self._outbox.settle(nack.lease_id) and nack.reason == "invalid":
            logger.warning("the trainer refused a group: %s", nack.detail)
