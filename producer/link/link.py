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

from producer.interfaces import Counters, Delivery, DownloadedPolicy, Identity, LinkEvents, Workload
from producer.link.connection import Connection
from producer.link.outbox import Outbox
from producer.link.sender import Sender
from producer.policies.download import PolicyDownload
from producer.policies.shared_file import read_in_background
from protocol import __version__
from protocol.config.transport import TransportSection
from protocol.errors import IncompatiblePeerError
from protocol.service import logs
from protocol.throttle import Throttle
from protocol.transport.channel import BadFrame, ClientChannel
from protocol.wire.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    Bye,
    Group,
    Hello,
    Lease,
    Nack,
    Policy,
    PolicyInfo,
    PolicyOffer,
    Reject,
    TrainerMessage,
    Welcome,
)
from protocol.wire.schemas import SCHEMA_VERSION

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
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="link", daemon=True)
        self._channel = channel
        self._identity = identity
        self._timeout_s = transport.heartbeat_timeout_s
        self._events = events
        self._counters = counters
        self._beat = beat

        self._answers: queue.SimpleQueue[Group | Nack] = queue.SimpleQueue()
        self._files: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._stop_by: float | None = None
        self._closing = threading.Lock()
        self._closed = False

        self._connection = Connection(endpoint, transport.heartbeat_timeout_s)
        self._outbox = Outbox(transport.max_unacked_bytes)
        self._was_full = False
        self._download = PolicyDownload(transport.blob_chunk_bytes)
        self._fetch = PolicyDownload(transport.blob_chunk_bytes)  # of a policy that need not be the newest
        self._asked: queue.SimpleQueue[PolicyInfo] = queue.SimpleQueue()
        self._fetching: PolicyInfo | None = None
        self._sender = Sender(channel, self._outbox, (self._download, self._fetch), identity, counters, workload)
        self._run_id = self._session = ""
        self._schema_version = SCHEMA_VERSION  # of the last greeting
        self._say = Throttle(logger)

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

    def fetch(self, policy: PolicyInfo) -> None:
        """Gets this policy, answered by `LinkEvents.fetched`; asked for again while it is under way, it comes once. Never
        blocks."""
        self._asked.put(policy)
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
        self._beat()
        self._take_answers()
        self._take_asked()
        self._take_files()
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
            me = self._identity
            held = self._outbox.held()
            hello = Hello(me.name, me.facts, me.capacity, held, __version__, me.swap_mode, me.evaluates, self._run_id)
            self._schema_version = self._channel.schema_version
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

    def _note_file(self, digest: str, blob: bytes | None) -> None:
        """On the thread that read it."""
        self._files.put((digest, blob))
        self._wake()

    def _take_files(self) -> None:
        while not self._files.empty():
            file = self._files.get_nowait()
            self._arrive(self._download.take_file(*file))
            self._fetched(self._fetch.take_file(*file))

    def _take_asked(self) -> None:
        while not self._asked.empty():
            policy = self._asked.get_nowait()
            if policy != self._fetching:
                self._fetching = policy
                if (refusal := self._fetch.announce(policy)) is not None:
                    logger.error("policy v%d cannot be evaluated here: %s", policy.version, refusal)
                    self._forget_fetch()
                    self._events.fetched(policy, None)

    def _arrive(self, arrived: DownloadedPolicy | None) -> None:
        if arrived is not None:
            self._events.policy_arrived(arrived)

    def _fetched(self, arrived: DownloadedPolicy | None) -> None:
        if arrived is not None:
            self._forget_fetch()
            self._events.fetched(arrived.policy, arrived)

    def _forget_fetch(self) -> None:
        self._fetching = None
        self._fetch.forget_policy()

    def _take_answers(self) -> None:
        while not self._answers.empty():
            self._outbox.finish(self._answers.get_nowait())

    def _note_fullness(self) -> None:
        full = self._outbox.full
        if full != self._was_full:
            self._was_full = full
            waiting = f"{self._outbox.num_groups} groups ({self._outbox.num_bytes} bytes) wait for acknowledgement"
            what = f"generation {'pauses' if full else 'resumes'}: {waiting} (transport.max_unacked_bytes)"
            self._say("outbox", what, logging.INFO)
            self._events.outbox_full(full)

    # Receiving

    def _refuse(self, frame: BadFrame) -> None:
        if frame.peer_schema is not None:
            raise IncompatiblePeerError(f"{frame.reason}: install the same release of slipstream on both sides")
        self._say("bad_frame", f"a frame from the trainer was refused: {frame.reason}")

    def _receive(self, message: TrainerMessage) -> bool:
        """Returns True when the trainer has finished."""
        match message:
            case Welcome():
                self._begin_session(message)
            case Reject(problems):
                self._take_refusal(problems)
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
                self._announce(message.policy)
            case Policy(policy):
                self._events.evaluates(message.evaluates)
                self._announce(policy)
            case Nack():
                self._drop(message)
            case BlobChunk():
                self._arrive(self._download.receive(message))
                self._fetched(self._fetch.receive(message))
            case PolicyOffer():
                for download in (self._download, self._fetch):
                    if (offered := download.take_offer(message)) is not None:
                        read_in_background(offered, message.shared_file, self._note_file)
            case BlobMissing(digest):
                self._download.give_up(digest)
                if self._fetching is not None and self._fetching.digest == digest:
                    missing = self._fetching
                    self._forget_fetch()
                    self._events.fetched(missing, None)
        return False

    def _take_refusal(self, problems: list[str]) -> None:
        """A trainer of the release before refuses everything but its own schema: no verdict on this producer."""
        if self.connected:
            self._lose("the trainer is of another release now")
        elif not self._connection.greeted:
            pass  # left over from before the reset
        elif self._channel.schema_version == self._schema_version:
            raise IncompatiblePeerError("the trainer refused this producer:\n  " + "\n  ".join(problems))
        else:
            logger.info("the trainer is of the release before: greeting it in schema %d", self._channel.schema_version)
            self._connection.greet_again()

    def _begin_session(self, welcome: Welcome) -> None:
        if welcome.session != self._session:
            self._forget_fetch()  # who asked will ask again if it still wants it
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
        logs.bind(run=welcome.run_id)
        logger.info("connected to the trainer of run %s (policy v%d)", welcome.run_id, welcome.policy.version)
        self._run_id, self._session = welcome.run_id, welcome.session
        self._connection.note_welcome()
        self._sender.start_over(welcome.heartbeat_interval_s)
        self._announce(welcome.policy)

    def _announce(self, policy: PolicyInfo) -> None:
        if (refusal := self._download.announce(policy)) is not None:
            self._events.policy_refused(policy, refusal)

    def _drop(self, nack: Nack) -> None:
        if self._outbox.abandon(nack.lease_id):
            self._counters.abandoned += 1
            self._events.abandoned(nack.lease_id)
        elif self._outbox.settle(nack.lease_id) and nack.reason == "invalid":
            self._say("invalid", f"the trainer refused a group: {nack.detail}")
