"""The producers that said hello, as last heard of, which of them have room for work, and how they part.

Guarantee: a lease is lost when a producer does not name it in two heartbeats in a row, and only then. The producer with the most
room, for its size, gets the next lease. At the end every producer that can be heard hears of it, however slow it is to read:
ZeroMQ drops what a peer has not read when its connection ends, and a producer that missed the end of the run would wait for this
trainer for ever. Silent producers are not waited for.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from protocol.channel.channel import ServerChannel
from protocol.wire.messages import Bye, Heartbeat, Hello

_LEASES_PER_TICK = 256
_LEASING_S = 0.05  # of a tick, after which what has arrived comes first: reading prompts from a slow disk takes time


@dataclass(eq=False)
class ProducerSession:
    """A connected producer, as last heard of."""

    name: str
    capacity: int
    last_heard: float  # of the caller's clock, seconds
    leases: set[str] = field(default_factory=set)
    release: str = ""  # "": unknown
    evaluates: bool = False  # whether it may be given leases of an evaluation
    evaluations: set[str] = field(default_factory=set)  # those; they take no room from the others
    of_this_run: bool = True  # False: what it held when it joined is another run's
    host: str = ""
    region: str = ""
    metrics: str = ""  # where others reach its metrics, HOST:PORT
    shares_gpu: bool = False  # with the trainer, in turns
    noted_prompts: dict[str, Any] = field(default_factory=dict)  # by lease, whose tokens will be compared
    leases_to_comparison: int = 0  # before the next one is noted
    heartbeat: Heartbeat = Heartbeat(-1, 0, [], 0, 0.0)  # noqa: RUF009  frozen; before the first one
    _absent: dict[str, float] = field(default_factory=dict)  # leases that its heartbeats do not name, and since when

    @property
    def room(self) -> int:
        """The number of leases that it would still take."""
        return self.capacity - len(self.leases)

    def may_serve(self, version: int) -> bool:
        """Return whether it serves this version or a newer one, or may come to it."""
        return self.heartbeat.num_refused == 0 or self.heartbeat.policy_version >= version

    def end(self) -> None:
        """End the session, so that it gets no lease."""
        self.capacity = 0

    def note(self, heartbeat: Heartbeat, interval_s: float) -> set[str]:
        """Take its report, heard at `last_heard`, and return the leases that are lost: they, or their answers, never arrived.
        One heartbeat comes `interval_s` after the other. A lease or an answer may be under way for one of them; those that
        waited here together, while this process stood still, count as one."""
        self.heartbeat = heartbeat
        self.capacity = heartbeat.capacity
        absent = (self.leases | self.evaluations) - set(heartbeat.held)
        self._absent = {lease_id: self._absent.get(lease_id, self.last_heard) for lease_id in absent}
        lost = {lease_id for lease_id, since in self._absent.items() if self.last_heard - since >= interval_s / 2}
        for lease_id in lost:
            del self._absent[lease_id]
        self.leases -= lost
        self.evaluations -= lost
        return lost

    def describe(self, now: float) -> str:
        """Return the producer's activity, in words."""
        beat = self.heartbeat
        if beat is ProducerSession.heartbeat:
            return f"{self.name} (no heartbeat yet)"
        refusal = f", refuses v{beat.refused_version}: {beat.refusal}" if beat.refused_version >= 0 else ""
        num_leases = len(self.leases) + len(self.evaluations)
        asleep = ", asleep in the trainer's turn" if beat.asleep_in >= 0 else ""
        return (
            f"{self.name} (policy v{beat.policy_version}{refusal}{asleep}, heard {now - self.last_heard:.1f} s ago, "
            f"{num_leases} leases: {beat.waiting} waiting, {beat.generating} generating, {beat.scoring} scoring, "
            f"{beat.unacked} not acknowledged)"
        )


class RoomQueue:
    """Producers with room for leases, the one with the most first. `note` one whose room may have grown; `refill` finds who was
    not noted. What is done for one lease does not grow with the number of producers."""

    def __init__(self, room: Callable[[ProducerSession], float]) -> None:
        self._room = room
        self._heap: list[tuple[float, int, bytes, ProducerSession]] = []  # by room, negative, and then by turn
        self._noted: dict[bytes, float] = {}  # the room that counts of those in the heap
        self._turns = itertools.count()

    def refill(self, producers: Iterable[tuple[bytes, ProducerSession]]) -> None:
        self._noted = {}
        self._heap = []
        for peer, session in producers:
            self.note(peer, session)

    def note(self, peer: bytes, session: ProducerSession) -> None:
        room = self._room(session)
        if room > self._noted.get(peer, 0):
            self._noted[peer] = room
            heapq.heappush(self._heap, (-room, next(self._turns), peer, session))

    def take(self) -> tuple[bytes, ProducerSession] | None:
        """The producer with the most room; `note` it again after its lease."""
        while self._heap:
            negative, _, peer, session = heapq.heappop(self._heap)
            if self._noted.get(peer) != -negative:
                continue
            del self._noted[peer]
            if self._room(session) == -negative:
                return peer, session
            self.note(peer, session)
        return None


def give_leases(
    channel: ServerChannel,
    queue: RoomQueue,
    give: Callable[[bytes, ProducerSession], bool | None],
    clock: Callable[[], float],
) -> list[bytes]:
    """Give leases while there is room, for a limited number and time. Return the producers that cannot be reached. `give` gives
    one to a producer: False if it cannot be reached, None if there is none to give."""
    lost, until = list[bytes](), clock() + _LEASING_S
    for number in range(_LEASES_PER_TICK):
        if number and clock() >= until:
            break
        next_one = queue.take()
        given = give(*next_one) if next_one else None
        if next_one is None or given is None:
            if next_one:
                queue.note(*next_one)
            return lost
        if given:
            queue.note(*next_one)
        else:
            lost.append(next_one[0])
    channel.wake()  # there is more to give, after a look at what has arrived
    return lost


FAREWELL_S = 30.0
_POLL_S = 0.2


def say_goodbye(
    channel: ServerChannel,
    peers: Iterable[bytes],
    reason: Literal["finished", "stopping"],
    *,
    silence_s: float,
    beat: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Say goodbye to all producers and wait for their goodbyes, at most `FAREWELL_S`. A producer that said nothing for
    `silence_s`, by `clock`, is gone; `beat` is called in every round."""
    heard = dict.fromkeys(peers, clock())
    for peer in heard:
        channel.send(peer, Bye(reason))
    deadline, look_at = time.monotonic() + FAREWELL_S, 0.0
    while heard and time.monotonic() < deadline:
        beat()
        for peer, message in channel.poll(_POLL_S):
            if isinstance(message, Bye):
                heard.pop(peer, None)
            elif isinstance(message, Hello | Heartbeat):  # it was away when the others were told, or is back already
                channel.send(peer, Bye(reason))
                if peer in heard:
                    heard[peer] = clock()
        if time.monotonic() >= look_at:
            look_at, silent_since = time.monotonic() + _POLL_S, clock() - silence_s
            heard = {peer: at for peer, at in heard.items() if at > silent_since}
