"""The producer's side of the wire: one thread that owns the channel.

Guarantee: the trainer learns of every lease's fate: a finished group is kept and sent again until the trainer settles it,
a failed lease is refused once (and left out of `held` when the connection is made anew). Leases and groups of a trainer
process that is gone are dropped. A trainer that falls silent is noticed within `heartbeat_timeout_s` and waited for,
visibly.

    connecting --Hello--> greeting --Welcome--> connected --silence, Bye--> connecting
                             |                      |
                           Reject              Bye(finished)          -> the thread ends and reports why
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from producer.download import BlobDownload
from producer.interfaces import Counters
from protocol.channel import BadFrame, ClientChannel
from protocol.codec import CodecError
from protocol.config import TransportSection
from protocol.errors import IncompatiblePeerError
from protocol.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    Bye,
    EngineFacts,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Nack,
    Policy,
    PolicyInfo,
    Reject,
    Welcome,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_RECONNECT_AFTER_S = 0.3
_REMIND_EVERY_S = 10.0
_RESEND_AFTER_S = 15.0  # a group that was neither settled nor lost with its connection


class LinkEvents(Protocol):
    """What the link tells the rest of the producer. Called on the link's thread."""

    def session_began(self, policy: PolicyInfo) -> None:
        """A trainer process that this producer has not served before; leases of the one before are void."""

    def leased(self, lease: Lease) -> None: ...

    def abandoned(self, lease_id: str) -> None:
        """The trainer does not want this lease's group any more."""

    def policy_arrived(self, policy: PolicyInfo, blob: bytes, announced_at: float) -> None: ...

    def ended(self, error: BaseException | None) -> None:
        """The last call. None: the trainer has finished, or `stop` was called."""


@dataclass(frozen=True)
class Identity:
    """What the trainer is told about this producer."""

    name: str
    facts: EngineFacts
    capacity: int


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
        busy_s: Callable[[], float],
    ) -> None:
        super().__init__(name="link", daemon=True)
        self._channel = channel
        self._identity = identity
        self._timeout_s = transport.heartbeat_timeout_s
        self._interval_s = transport.heartbeat_interval_s
        self._chunk_bytes = transport.blob_chunk_bytes
        self._endpoint = endpoint
        self._events = events
        self._counters = counters
        self._busy_s = busy_s

        self._answers: queue.SimpleQueue[Group | Nack] = queue.SimpleQueue()
        self._stop_by: float | None = None
        self._closing = threading.Lock()
        self._closed = False

        self._session: str | None = None
        self.connected = False
        self._heard_at = 0.0
        self._hello_at: float | None = None
        self._hello_after = 0.0
        self._heartbeat_at = 0.0
        self._waiting_since = self._reminded_at = 0.0
        self._working: set[str] = set()
        self._outbox: dict[str, Group] = {}
        self._sent_at: dict[str, float] = {}
        self._policy: PolicyInfo | None = None
        self._download: BlobDownload | None = None
        self._last_bad_frame_at = float("-inf")

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
            self._await_trainer(f"waiting for the trainer at {self._endpoint}")
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
        if self._stop_by is not None and (not self._outbox or not self.connected or now >= self._stop_by):
            self._say_goodbye()
            return True
        if self.connected and now - self._heard_at > self._timeout_s:
            self._lose(f"the trainer has been silent for {self._timeout_s:g} s; waiting for it at {self._endpoint}")
        if self.connected:
            self._send_due(now)
        else:
            self._greet(now)
        for message in self._channel.poll(_TICK_S):
            self._heard_at = time.monotonic()
            if isinstance(message, BadFrame):
                self._refuse(message)
            elif self._receive(message):
                return True
        return False

    # Connecting

    def _await_trainer(self, text: str) -> None:
        self._waiting_since = self._reminded_at = time.monotonic()
        logger.info("%s", text)

    def _greet(self, now: float) -> None:
        if now - self._reminded_at >= _REMIND_EVERY_S:
            self._reminded_at = now
            logger.info("waiting for the trainer at %s (%.0f s)", self._endpoint, now - self._waiting_since)
        if self._hello_at is not None and now - self._hello_at >= self._timeout_s:
            self._reconnect()
        if self._hello_at is None and now >= self._hello_after:
            hello = Hello(self._identity.name, self._identity.facts, self._identity.capacity, self._held())
            if self._channel.send(hello):
                self._hello_at = now

    def _lose(self, text: str) -> None:
        if self.connected:
            self.connected = False
            self._await_trainer(text)
        self._reconnect()

    def _reconnect(self) -> None:
        self._channel.reset()
        self._hello_at = None
        self._hello_after = time.monotonic() + _RECONNECT_AFTER_S

    def _say_goodbye(self) -> None:
        if self.connected:
            self._channel.send(Bye("stopping"))

    # Sending

    def _held(self) -> list[str]:
        return sorted(self._working) + list(self._outbox)

    def _take_answers(self) -> None:
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return
            if answer.lease_id not in self._working:
                continue  # of a session that is over
            self._working.remove(answer.lease_id)
            if isinstance(answer, Group):
                self._outbox[answer.lease_id] = answer
            elif self.connected:
                self._channel.send(answer)

    def _send_due(self, now: float) -> None:
        if now - self._heartbeat_at >= self._interval_s:
            self._heartbeat_at = now
            self._channel.send(
                Heartbeat(
                    self._counters.policy_version,
                    self._identity.capacity,
                    self._held(),
                    self._counters.tokens,
                    self._busy_s(),
                )
            )
        for lease_id in [i for i in self._outbox if now - self._sent_at.get(i, float("-inf")) >= _RESEND_AFTER_S]:
            self._send_group(lease_id, now)
        if self._download is not None:
            for request in self._download.due_requests(now):
                self._channel.send(request)

    def _send_group(self, lease_id: str, now: float) -> None:
        try:
            if self._channel.send(self._outbox[lease_id]):
                self._sent_at[lease_id] = now
        except CodecError as error:  # too large: no repetition will help
            self._forget(lease_id)
            self._channel.send(Nack(lease_id, "generation_failed", str(error)))

    def _forget(self, lease_id: str) -> bool:
        self._sent_at.pop(lease_id, None)
        return self._outbox.pop(lease_id, None) is not None

    # Receiving

    def _refuse(self, frame: BadFrame) -> None:
        if frame.peer_schema is not None:
            raise IncompatiblePeerError(f"{frame.reason}: install the same release of slipstream on both sides")
        logger.debug("frame refused: %s", frame.reason)
        if self._heard_at - self._last_bad_frame_at >= _REMIND_EVERY_S:
            self._last_bad_frame_at = self._heard_at
            logger.warning("a frame from the trainer was refused: %s", frame.reason)

    def _receive(self, message: Message) -> bool:
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
                why = "is stopping" if reason == "stopping" else "does not know this session"
                self._lose(f"the trainer {why}; waiting for it at {self._endpoint}")
            case _ if not self.connected:
                pass  # left over from before the reset
            case Lease(lease_id):
                if lease_id not in self._working and lease_id not in self._outbox:
                    self._working.add(lease_id)
                    self._events.leased(message)
            case Ack(lease_id):
                self._forget(lease_id)
                self._announce(message.policy)
            case Policy(policy):
                self._announce(policy)
            case Nack(lease_id):
                self._drop(message)
            case BlobChunk():
                self._take_chunk(message)
            case BlobMissing(digest):
                if self._download is not None and self._download.policy.digest == digest:
                    self._download = self._policy = None  # the next announcement names one that exists
            case _:
                logger.debug("unexpected %s ignored", type(message).__name__)
        return False

    def _begin_session(self, welcome: Welcome) -> None:
        if welcome.session != self._session:
            if self._working or self._outbox:
                logger.warning(
                    "another trainer process: %d leases of the one before are void",
                    len(self._working) + len(self._outbox),
                )
            self._counters.abandoned += len(self._working) + len(self._outbox)
            self._working.clear()
            self._outbox.clear()
            self._policy = self._download = None
            self._events.session_began(welcome.policy)
        logger.info("connected to the trainer of run %s (policy v%d)", welcome.run_id, welcome.policy.version)
        self._session = welcome.session
        self._interval_s = welcome.heartbeat_interval_s
        self.connected = True
        self._heartbeat_at = float("-inf")
        self._sent_at.clear()
        if self._download is not None:
            self._download.forget_requests()
        self._announce(welcome.policy)

    def _announce(self, policy: PolicyInfo) -> None:
        """The newest policy; said again and again, so only a change counts."""
        if policy == self._policy:
            return
        self._policy = policy
        self._download = BlobDownload(policy, self._chunk_bytes, time.monotonic())

    def _take_chunk(self, chunk: BlobChunk) -> None:
        if self._download is None:
            return
        blob = self._download.receive(chunk)
        if blob is not None:
            self._events.policy_arrived(self._download.policy, blob, self._download.announced_at)
            self._download = None

    def _drop(self, nack: Nack) -> None:
        if nack.lease_id in self._working:
            self._working.remove(nack.lease_id)
            self._counters.abandoned += 1
            self._events.abandoned(nack.lease_id)
        elif self._forget(nack.lease_id) and nack.reason == "invalid":
            logger.warning("the trainer refused a group: %s", nack.detail)
