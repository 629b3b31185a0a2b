"""The producers that said hello, as last heard of, and who of them has room for work.

Guarantee: a lease is lost when a producer does not name it in two heartbeats in a row, and only then. The producer with the most
room gets the next lease.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protocol.transport.channel import ServerChannel
from protocol.wire.messages import Heartbeat

_LEASES_PER_TICK = 256


@dataclass(eq=False)
class ProducerSession:
    """One producer."""

    name: str
    capacity: int
    last_heard: float  # of the caller's clock, seconds
    leases: set[str] = field(default_factory=set)
    release: str = ""  # "": unknown
    evaluates: bool = False  # whether it may be given leases of an evaluation
    evaluations: set[str] = field(default_factory=set)  # those; they take no room from the others
    of_this_run: bool = True  # False: what it held when it joined is another run's
    heartbeat: Heartbeat = Heartbeat(-1, 0, [], 0, 0.0)  # noqa: RUF009  frozen; before the first one
    _absent: dict[str, float] = field(default_factory=dict)  # leases that its heartbeats do not name, and since when

    @property
    def room(self) -> int:
        """Leases that it would still take."""
        return self.capacity - len(self.leases)

    def note(self, heartbeat: Heartbeat, interval_s: float) -> set[str]:
        """Takes its report, heard at `last_heard`, and returns the leases that are lost: they, or their answers, never arrived.

        Args:
            interval_s: from one of its heartbeats to the next. A lease or an answer may be under way for one of them; those that
                waited here together, while this process stood still, count as one.
        """
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
        """What it is doing, in words."""
        beat = self.heartbeat
        if beat is ProducerSession.heartbeat:
            return f"{self.name} (no heartbeat yet)"
        refusal = f", refuses v{beat.refused_version}: {beat.refusal}" if beat.refused_version >= 0 else ""
        num_leases = len(self.leases) + len(self.evaluations)
        return (
            f"{self.name} (policy v{beat.policy_version}{refusal}, heard {now - self.last_heard:.1f} s ago, "
            f"{num_leases} leases: {beat.waiting} waiting, {beat.generating} generating, {beat.scoring} scoring, "
            f"{beat.unacked} not acknowledged)"
        )


def give_leases(
    channel: ServerChannel,
    producers: Iterable[tuple[bytes, ProducerSession]],
    room: Callable[[ProducerSession], int],
    give: Callable[[bytes, ProducerSession], bool | None],
) -> list[bytes]:
    """Gives leases while there is room, a limited number at a time. Returns the producers that cannot be reached.

    Args:
        give: gives one to this producer. False: it cannot be reached; None: there is none to give.
    """
    reachable, lost = dict(producers), list[bytes]()
    for _ in range(_LEASES_PER_TICK):
        if not reachable:
            return lost
        peer, session = max(reachable.items(), key=lambda entry: room(entry[1]))
        given = give(peer, session) if room(session) > 0 else None
        if given is None:
            return lost
        if not given:
            lost.append(peer)
            del reachable[peer]
    channel.wake()  # there is more to give, after a look at what has arrived
    return lost
