"""The producers that are connected: which may join, which leases each keeps, which are lost.

Guarantee: a producer that does not fit the run is refused with every reason, and one that runs an outdated bundle is sent the
current one. The leases of a producer that leaves, is killed, is silent for `heartbeat_timeout_s` or has lost them go out again,
unless their groups have arrived. Methods belong to the intake's thread.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from consumer.link.commit_queue import CommitQueue
from consumer.link.dispatcher import Evaluations
from consumer.link.gpu_turns import GpuTurns
from consumer.link.offered_bundle import NO_BUNDLE, OfferedBundle
from consumer.link.policy_store import PolicyStore
from consumer.link.refusals import RefusalWatch
from consumer.link.sessions import ProducerSession
from protocol.channel.channel import ServerChannel
from protocol.exposition import Target
from protocol.runtime.logs import Throttle
from protocol.wire.handshake import TrainerNeeds, problems, turn_problems
from protocol.wire.messages import Ack, Heartbeat, Hello, Nack, Policy, Reject, RunPlan, Welcome
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape
from replay.lease_ids import Key
from replay.prompt_table import LeaseRecord

logger = logging.getLogger(__name__)


_MAX_REMEMBERED = 16_384  # producers, connected or not
_TOLD_AT_ONCE = 64  # producers
_LOOK_EVERY_S = 0.05  # for who is silent
_RECONNECT_S = 0.3  # that a process which lives takes to connect again; it has a heartbeat interval for it, or this


@dataclass(frozen=True)
class SessionTerms:
    """The terms of a session: requirements of this trainer process, and facts that producers get when they join."""

    needs: TrainerNeeds
    shape: GroupShape  # of their groups
    run_id: str
    session: str  # unique per trainer process; the run may outlive it
    lease_timeout_s: float  # that a lease which a producer brings along gets from now on
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    host: str = ""  # where it runs
    region: str = ""
    bundle: OfferedBundle = NO_BUNDLE
    turns: GpuTurns | None = None  # on the GPU; None: it is not shared
    refusals: RefusalWatch = field(default_factory=RefusalWatch)
    plan: RunPlan = field(default_factory=RunPlan)


@dataclass(eq=False)
class Fleet:
    """The producers that are connected."""

    channel: ServerChannel
    buffer: RolloutBuffer
    commits: CommitQueue
    store: PolicyStore
    evaluations: Evaluations | None
    terms: SessionTerms
    clock: Callable[[], float]
    warn: Throttle
    sessions: dict[bytes, ProducerSession] = field(default_factory=dict)  # by peer; any thread may copy them
    tokens_generated: int = 0  # by all producers, since this trainer started
    num_goodbyes: int = 0
    _peers: dict[str, bytes] = field(default_factory=dict)  # of the sessions, by producer
    _look_at: float = -math.inf
    _look_for: deque[tuple[float, bytes]] = field(default_factory=deque)  # from when on
    _announced: Policy | None = None
    _untold: deque[bytes] = field(default_factory=deque)  # who does not know it yet
    _tokens_seen: dict[str, int] = field(default_factory=dict)  # by producer, as last reported; outlives its sessions
    _refused: dict[str, int] = field(default_factory=dict)  # by producer, the version that it refuses

    def join(self, peer: bytes, hello: Hello) -> None:
        """Answer a Hello."""
        now, terms = self.clock(), self.terms
        former = self.sessions.get(peer)
        if former is not None and former.name != hello.producer:
            self.lose(peer, f"it calls itself {hello.producer} now")
        if hello.bundle not in ("", terms.bundle.digest):
            logger.info(
                "producer %s runs the outdated bundle %s; sending the current one", hello.producer, hello.bundle[:12]
            )
            self.channel.send(peer, terms.bundle.answer)
            return
        found = problems(terms.needs, hello.facts, hello.swap_mode)
        found += turn_problems(hello, terms.turns.ids if terms.turns else None)
        if found:
            self.warn("refused", f"refused producer {hello.producer}: {'; '.join(found)}")
            self.channel.send(peer, Reject(found))
            return
        shares_gpu = terms.turns is not None and terms.turns.shares(hello)
        if terms.turns is not None:  # before its last session ends, or the GPU would seem free in between
            (terms.turns.join if shares_gpu else terms.turns.leave)(hello.producer)
        if (other := self._peers.get(hello.producer)) is not None:
            self._end(other)
        self._release(hello.producer, keep=hello.held)
        leases = self.buffer.leased_to(hello.producer)
        evaluations = self.evaluations.release(hello.producer, keep=hello.held) if self.evaluations else set()
        of_this_run = hello.run_id == terms.run_id
        answers = self.buffer.adopt(
            hello.producer,
            [lease_id for lease_id in hello.held if lease_id not in leases | evaluations],
            deadline=now + terms.lease_timeout_s,
            of_this_run=of_this_run,
        )
        leases |= {lease_id for lease_id, wanted in answers.items() if wanted}
        leases -= self.commits.waiting()
        self._peers[hello.producer] = peer
        self.sessions[peer] = ProducerSession(
            hello.producer, hello.capacity, now, leases, hello.release, hello.evaluates, evaluations, of_this_run,
            hello.host, hello.region, hello.metrics, shares_gpu,
        )  # fmt: skip
        logger.info(
            "producer %s joined (release %s, up to %d groups at once)", hello.producer, hello.release, hello.capacity
        )
        newest = self.store.newest
        self.channel.send(peer, Welcome(terms.run_id, terms.session, newest, terms.heartbeat_interval_s, terms.plan))
        for lease_id, wanted in answers.items():
            if wanted is None:
                self.channel.send(peer, Ack(lease_id, "duplicate", newest))
            elif not wanted:
                self.channel.send(peer, Nack(lease_id, "unknown_lease", "its prompt is not wanted any more"))

    def targets(self) -> list[Target]:
        """Return where producers serve their metrics. Any thread may call it."""
        found = list(self.sessions.values())
        return [Target(each.metrics, "rl-producer", each.name, each.host) for each in found if each.metrics]

    def note(self, peer: bytes, session: ProducerSession, message: Heartbeat) -> None:
        """Take a heartbeat and answer it."""
        before = self._tokens_seen.pop(session.name, message.tokens_generated)  # its first words after Welcome
        self.tokens_generated += max(0, message.tokens_generated - before)
        self._tokens_seen[session.name] = message.tokens_generated
        if len(self._tokens_seen) > _MAX_REMEMBERED:  # who has said nothing for longest
            del self._tokens_seen[next(iter(self._tokens_seen))]
        lost = session.note(message, self.terms.heartbeat_interval_s)
        self._note_refusal(session.name, message)
        self.terms.refusals.note(message, self.store.newest.version)
        if self.terms.turns is not None:
            self.terms.turns.report(session.name, message.asleep_in)
        if lost:
            self._release(session.name, keep=session.leases | session.evaluations)
            text = f"{session.name} left {len(lost)} of its leases out of two heartbeats in a row; leasing their prompts again"
            self.warn("lost", text)
        self.channel.send(peer, self._announcement(session))

    def lose(self, peer: bytes, why: str) -> None:
        session = self._end(peer)
        if self.terms.turns is not None:
            self.terms.turns.leave(session.name)
        released = self._release(session.name)
        logger.warning("producer %s left (%s); %d prompts go out again", session.name, why, len(released))

    def note_disconnected(self, peers: Iterable[bytes], now: float) -> None:
        """Note ended connections. A process that lives connects again by itself; one that has not a little later is gone."""
        for peer in peers:
            if peer in self.sessions:
                self._look_for.append((now + max(_RECONNECT_S, self.terms.heartbeat_interval_s), peer))

    def lose_silent(self, now: float, stood_still_s: float) -> None:
        """End the sessions of producers that cannot be reached or were silent for too long, not counting the time in which the
        intake stood still."""
        while self._look_for and self._look_for[0][0] <= now:
            _, peer = self._look_for.popleft()
            session = self.sessions.get(peer)
            if session is not None and not self.channel.send(peer, self._announcement(session)):
                self.lose(peer, "its connection ended")
        if stood_still_s > self.terms.heartbeat_interval_s:
            for session in self.sessions.values():
                session.last_heard = min(now, session.last_heard + stood_still_s)
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        for peer, session in list(self.sessions.items()):
            if now - session.last_heard > self.terms.heartbeat_timeout_s:
                self.lose(peer, f"silent for {now - session.last_heard:.1f} s")

    def forget(self, producer: str, lease_id: str) -> None:
        """Forget a lease that has expired."""
        if producer in self._peers:
            self.sessions[self._peers[producer]].leases.discard(lease_id)

    def announce(self) -> None:
        """Announce policy and turn to all producers when they have changed: to some now, to the others in the
        rounds that follow, so that acknowledgements come between them."""
        announcement = self._announcement(None)
        if announcement != self._announced:
            self._announced = announcement
            self._untold = deque(self.sessions)
        for _ in range(min(len(self._untold), _TOLD_AT_ONCE)):
            peer = self._untold.popleft()
            if peer in self.sessions:
                self.channel.send(peer, self._announcement(self.sessions[peer]))
        if self._untold:
            self.channel.wake()

    def _end(self, peer: bytes) -> ProducerSession:
        session = self.sessions.pop(peer)
        del self._peers[session.name]
        session.end()
        return session

    def _announcement(self, session: ProducerSession | None) -> Policy:
        """Return the announcement to one producer, or (None) everything that any of them hears."""
        turns = self.terms.turns if session is None or session.shares_gpu else None
        evaluated = self.evaluations.policy if self.evaluations else None
        return Policy(self.store.newest, evaluated, turns.turn if turns else None)

    def _note_refusal(self, name: str, message: Heartbeat) -> None:
        """Count a version once for each producer that refuses it."""
        if message.refused_version not in (-1, self._refused.get(name)):
            self.buffer.totals["swaps_refused"] += 1
            logger.error("%s refuses policy v%d: %s", name, message.refused_version, message.refusal)
            self._refused[name] = message.refused_version
            if len(self._refused) > _MAX_REMEMBERED:
                del self._refused[next(iter(self._refused))]
        elif message.refused_version == -1:
            self._refused.pop(name, None)

    def _release(self, producer: str, keep: Iterable[str] = ()) -> list[LeaseRecord[Key]]:
        """Take back the leases of a producer, but those that it keeps and those whose groups have arrived."""
        keep = frozenset(keep)
        if self.evaluations is not None:
            self.evaluations.release(producer, keep)
        return self.buffer.release(producer, self.clock(), keep=keep | self.commits.waiting())
