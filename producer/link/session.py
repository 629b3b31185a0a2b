"""The producer's side of the wire: one thread that owns the channel.

Guarantee: the trainer learns of every lease's fate: a finished group is kept and sent again until the trainer settles it,
also when that is another process of the same run; a failed lease is refused once. Only another run voids what is held. A
trainer that falls silent is noticed within `heartbeat_timeout_s` and waited for, visibly.

    connecting --Hello--> greeting --Welcome--> connected --silence, Bye--> connecting
                             |                      |
                    Reject, BundleOffer        Bye(finished)          -> the thread ends and reports why
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from producer.link.events import (
    EvaluationNoted,
    LeaseAbandoned,
    LinkEnded,
    LinkEvent,
    OutboxFull,
    RunBegan,
    SessionBegan,
    TurnNoted,
)
from producer.link.fetch import Fetcher
from producer.link.outbox import Outbox
from producer.link.policy_source import PolicySource
from producer.metrics import Counters, Delivery, Workload
from protocol import __version__
from protocol.channel.channel import BadFrame, ClientChannel
from protocol.config.operation import TransportSection
from protocol.errors import REFUSED_FIX, BundleChangedError, IncompatiblePeerError, PolicyRefusedError
from protocol.runtime import logs
from protocol.runtime.logs import Throttle
from protocol.wire.codec import CodecError
from protocol.wire.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    BlobRequest,
    BundleOffer,
    Bye,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Nack,
    Policy,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
    Reject,
    RelayPeers,
    TrainerMessage,
    Welcome,
)

logger = logging.getLogger(__name__)

REMIND_EVERY_S = 10.0
_RECONNECT_AFTER_S = 0.3


@dataclass
class Connection:
    """Belongs to the link, which notes greetings, welcomes and messages. Any thread may read it."""

    endpoint: str
    timeout_s: float
    connected: bool = False
    heard_at: float = 0.0
    hello_at: float | None = None  # of the greeting that went out over this connection
    _hello_after: float = 0.0
    _waiting_since: float = 0.0
    _reminded_at: float = 0.0

    def await_trainer(self, now: float, reason: str = "") -> None:
        """Say that the trainer is waited for, with the reason if it was there before."""
        self.connected = False
        self._waiting_since = self._reminded_at = now
        waiting = f"waiting for {'it' if reason else 'the trainer'} at {self.endpoint}"
        logger.info("%s", f"{reason}; {waiting}" if reason else waiting)

    def remind(self, now: float) -> None:
        if now - self._reminded_at >= REMIND_EVERY_S:
            self._reminded_at = now
            logger.info("waiting for the trainer at %s (%.0f s)", self.endpoint, now - self._waiting_since)

    def hello_due(self, now: float) -> bool:
        return self.hello_at is None and now >= self._hello_after

    def hello_unanswered(self, now: float) -> bool:
        return self.hello_at is not None and now - self.hello_at >= self.timeout_s

    def start_over(self, now: float) -> None:
        """The next greeting goes out over a new connection, a moment later."""
        self.hello_at = None
        self._hello_after = now + _RECONNECT_AFTER_S

    def is_silent(self, now: float) -> bool:
        return self.connected and now - self.heard_at > self.timeout_s


class TakeAgain(NamedTuple):
    """The newest policy was not taken for a reason that may pass: download it again."""

    policy: PolicyInfo


Mail = Group | Nack | PolicyInfo | TakeAgain | PolicyRequest | BlobRequest | Callable[[], None]
"""The answer to a lease; a policy to download, which `PolicyFetched` answers; a request of a download; or a call."""


class Mailbox:
    """`put` and `wake` may be called from any thread. The channel, which belongs to the link's, is woken."""

    def __init__(self, channel: ClientChannel) -> None:
        self.channel = channel
        self._items: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False

    def put(self, mail: Mail) -> None:
        self._items.put(mail)
        self.wake()

    def wake(self) -> None:
        with self._closing:
            if not self._closed:
                self.channel.wake()

    def take(self) -> Iterator[Mail]:
        while not self._items.empty():
            yield self._items.get_nowait()

    def close(self) -> None:
        """Close the channel, too."""
        with self._closing:
            self._closed = True
            self.channel.close()


_TICK_S = 0.1


class Link(threading.Thread):
    """Start it once; `stop` may be called from any thread. `hello` describes this producer to the trainer, `sources`
    have policies beside the trainer; `emit` takes the events; `beat` is called in every round."""

    def __init__(
        self,
        mailbox: Mailbox,
        hello: Hello,
        transport: TransportSection,
        sources: PolicySource,
        emit: Callable[[LinkEvent], object],
        counters: Counters,
        workload: Callable[[], Workload],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="link", daemon=True)
        self._mailbox = mailbox
        self._channel = mailbox.channel
        self._emit = emit
        self._counters = counters
        self._beat = beat
        self._stop_by: float | None = None
        self._connection = Connection(self._channel.endpoint, transport.heartbeat_timeout_s)
        self._outbox = Outbox(transport.max_unacked_bytes)
        self._was_full = False
        self._sources = sources
        self._fetcher = Fetcher(sources, mailbox.put, emit, takes_patches=hello.swap_mode == "full")
        self._hello = hello
        self._workload = workload
        self._interval_s = 0.0
        self._heartbeat_at = -math.inf
        self._said_asleep_in = self._said_refused = -1
        self._run_id = self._session = ""
        self._say = Throttle(logger)

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def delivery(self) -> Delivery:
        """Read by another thread: each number is true, but not all at the same moment."""
        box, heard_ago_s = self._outbox, time.monotonic() - self._connection.heard_at
        return Delivery(self.connected, heard_ago_s, box.num_held, box.num_groups, box.num_bytes, box.full)

    def stop(self, flush_s: float) -> None:
        """End the thread after at most `flush_s` spent on delivering what is finished."""
        self._stop_by = time.monotonic() + flush_s
        self._mailbox.wake()

    def run(self) -> None:
        error: BaseException | None = None
        try:
            self._connection.await_trainer(time.monotonic())
            while not self._step():
                pass
        except BaseException as problem:
            error = problem
        self._fetcher.forget()
        self._mailbox.close()
        self._emit(LinkEnded(error))

    def _step(self) -> bool:
        """Do one round: send what is due, listen briefly. Returns True when the thread has nothing more to do."""
        now = time.monotonic()
        self._beat()
        self._take_mail()
        self._note_fullness()
        if self._stop_by is not None and (self._outbox.all_settled or not self.connected or now >= self._stop_by):
            if self._outbox.num_groups:
                logger.warning("%d finished groups were not acknowledged and are lost", self._outbox.num_groups)
            self._say_goodbye()
            return True
        if self._connection.is_silent(now):
            self._lose(f"the trainer has been silent for {self._connection.timeout_s:g} s")
        if self.connected:
            self._send_due(now)
        else:
            self._greet(now)
        for message in self._channel.poll(_TICK_S):
            self._connection.heard_at = time.monotonic()
            if isinstance(message, BadFrame):
                self._refuse(message)
            elif self._receive(message):
                return True
        return False

    def _greet(self, now: float) -> None:
        self._connection.remind(now)
        if self._connection.hello_unanswered(now):
            self._reconnect()
        if self._connection.hello_due(now):
            held = self._outbox.held()
            if self._channel.send(structs.replace(self._hello, held=held, release=__version__, run_id=self._run_id)):
                self._connection.hello_at = now

    def _send_due(self, now: float) -> None:
        news = (self._counters.asleep_in, self._counters.refused_version)
        if now - self._heartbeat_at >= self._interval_s or news != (self._said_asleep_in, self._said_refused):
            self._heartbeat_at = now
            self._said_asleep_in, self._said_refused = news
            self._channel.send(self._heartbeat())
        for answer in self._outbox.due(now):
            try:
                if self._channel.send(answer):
                    self._outbox.note_sent(answer, now)
            except CodecError as error:  # too large: no repetition will help
                self._outbox.replace(Nack(answer.lease_id, "generation_failed", str(error)))

    def _heartbeat(self) -> Heartbeat:
        counters, work = self._counters, self._workload()
        return Heartbeat(
            policy_version=counters.policy_version,
            capacity=self._hello.capacity if work.takes_leases else 0,
            held=self._outbox.held(),
            tokens_generated=counters.tokens,
            busy_s=work.busy_s,
            waiting=len(work.waiting_floors),
            generating=work.generating,
            scoring=work.scoring,
            unacked=self._outbox.num_groups,
            idle_s=counters.idle_s,
            refused_version=counters.refused_version,
            refusal=counters.refusal,
            relay=self._sources.relay_endpoint,
            asleep_in=self._said_asleep_in,
            num_refused=counters.num_refused,
        )

    def _lose(self, reason: str) -> None:
        if self.connected:
            self._connection.await_trainer(time.monotonic(), reason)
            self._sources.admit(None)
        self._reconnect()

    def _reconnect(self) -> None:
        self._fetcher.note_connection(False)
        self._channel.reset()
        self._connection.start_over(time.monotonic())

    def _say_goodbye(self) -> None:
        if self.connected:
            self._channel.send(Bye("stopping"))

    def _take_mail(self) -> None:
        for mail in self._mailbox.take():
            match mail:
                case PolicyInfo():
                    self._fetcher.request(mail)
                case TakeAgain(policy):
                    self._fetcher.forget_announcement(policy)
                case Group() | Nack():
                    self._outbox.finish(mail)
                case PolicyRequest() | BlobRequest():
                    if self.connected:  # else the download repeats it over the next connection
                        self._channel.send(mail)
                case _:
                    mail()

    def _note_fullness(self) -> None:
        full = self._outbox.full
        if full != self._was_full:
            self._was_full = full
            waiting = f"{self._outbox.num_groups} groups ({self._outbox.num_bytes} bytes) wait for acknowledgement"
            what = f"generation {'pauses' if full else 'resumes'}: {waiting} (transport.max_unacked_bytes)"
            self._say("outbox", what, logging.INFO)
            self._emit(OutboxFull(full))

    def _refuse(self, frame: BadFrame) -> None:
        if frame.peer_schema is not None:
            raise IncompatiblePeerError(f"{frame.reason}: install the same release of slipstream on both sides")
        self._say("bad_frame", f"a frame from the trainer was refused: {frame.reason}")

    def _receive(self, message: TrainerMessage) -> bool:
        """Return True when the trainer has finished."""
        match message:
            case Welcome():
                self._begin_session(message)
            case Reject(problems):
                self._take_refusal(problems)
            case BundleOffer(digest) if self._hello.bundle not in ("", digest):
                raise BundleChangedError(f"the trainer has another bundle ({digest[:12]}): starting again with it")
            case Bye("finished"):
                logger.info("the trainer has finished")
                self._say_goodbye()
                return True
            case Bye(reason):
                self._say_goodbye()
                if reason == "stopping":
                    self._check_served()
                self._lose(f"the trainer {'is stopping' if reason == 'stopping' else 'does not know this session'}")
            case _ if not self.connected:
                pass  # left over from before the reset
            case Lease(lease_id):
                if self._outbox.begin(lease_id):
                    self._emit(message)
            case Ack(lease_id):
                self._counters.settled += self._outbox.settle(lease_id)
                self._fetcher.announce(message.policy)
            case Policy(policy):
                self._emit(EvaluationNoted(message.evaluates))
                self._emit(TurnNoted(message.turn))
                self._fetcher.announce(policy)
            case Nack() if self._outbox.abandon(message.lease_id):
                self._counters.abandoned += 1
                self._emit(LeaseAbandoned(message.lease_id))
            case Nack() if self._outbox.settle(message.lease_id) and message.reason == "invalid":
                self._say("invalid", f"the trainer refused a group: {message.detail}")
            case PolicyOffer() | BlobChunk() | BlobMissing():
                self._fetcher.receive(message)
            case RelayPeers():
                self._sources.admit(message)
        return False

    def _check_served(self) -> None:
        """End the producer if the trainer stops and nothing that it published can be served here."""
        counters = self._counters
        if counters.policy_version < 0 and counters.num_refused > 0:
            raise PolicyRefusedError(
                f"the trainer stops, and no policy version is served here: v{counters.refused_version} is refused: "
                f"{counters.refusal}. {REFUSED_FIX}"
            )

    def _take_refusal(self, problems: list[str]) -> None:
        """End the producer, unless the refusal answers a greeting over an earlier connection."""
        if self.connected:
            self._lose("the trainer is of another release now")
        elif self._connection.hello_at is not None:
            raise IncompatiblePeerError("the trainer refused this producer:\n  " + "\n  ".join(problems))

    def _begin_session(self, welcome: Welcome) -> None:
        if welcome.session != self._session:
            self._fetcher.forget()
            # Of the trainer before, and not what the first heartbeat is to say. The registry notes what is served on.
            self._counters.policy_version = self._counters.refused_version = -1
            self._counters.num_refused = 0
        if welcome.run_id != self._run_id:
            if count := self._outbox.void():
                logger.warning("the trainer of another run: %d leases of run %s are void", count, self._run_id)
            self._counters.abandoned += count
            self._emit(RunBegan(welcome.policy, welcome.plan))
        elif welcome.session != self._session:
            logger.info("another process of the same run: %d leases go on", self._outbox.num_held)
            self._emit(SessionBegan(welcome.policy, welcome.plan))
        logs.bind(run=welcome.run_id)
        logger.info("connected to the trainer of run %s (policy v%d)", welcome.run_id, welcome.policy.version)
        self._run_id, self._session = welcome.run_id, welcome.session
        self._connection.connected = True
        self._interval_s, self._heartbeat_at = welcome.heartbeat_interval_s, -math.inf
        self._outbox.forget_sends()
        self._fetcher.note_connection(True)
        self._fetcher.announce(welcome.policy)
