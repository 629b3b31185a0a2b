"""The producers that said hello, as last heard of, and who of them has room for work.

Guarantee: a lease is lost when a producer does not name it in two heartbeats in a row, and only then.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.wire.messages import Heartbeat


class FleetMember(NamedTuple):
    """A connected producer in numbers."""

    name: str
    release: str  # "": unknown
    policy_version: int  # -1 while it serves none
    num_leases: int
    heard_ago_s: float
    idle_s: float  # since it started, as it says
    refused_version: int  # -1: none


@dataclass
class ProducerSession:
    """One producer."""

    name: str
    capacity: int
    last_heard: float  # of the caller's clock, seconds
    leases: set[str] = field(default_factory=set)
    release: str = ""
    evaluates: bool = False  # whether it may be given leases of an evaluation
    evaluations: set[str] = field(default_factory=set)  # those; they take no room from the others
    of_this_run: bool = True  # False: what it held when it joined is another run's
    heartbeat: Heartbeat | None = None
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

    def member(self, now: float) -> FleetMember:
        beat = self.heartbeat
        version, idle_s, refused = (beat.policy_version, beat.idle_s, beat.refused_version) if beat else (-1, 0.0, -1)
        heard_ago_s = now - self.last_heard
        return FleetMember(self.name, self.release, version, len(self.leases), heard_ago_s, idle_s, refused)

    def describe(self, now: float) -> str:
        """What it is doing, in words."""
        beat = self.heartbeat
        if beat is None:
            return f"{self.name} (no heartbeat yet)"
        refusal = f", refuses v{beat.refused_version}: {beat.refusal}" if beat.refused_version >= 0 else ""
        num_leases = len(self.leases) + len(self.evaluations)
        return (
            f"{self.name} (policy v{beat.policy_version}{refusal}, heard {now - self.last_heard:.1f} s ago, "
            f"{num_leases} leases: {beat.waiting} waiting, {beat.generating} generating, {beat.scoring} scoring, "
            f"{beat.unacked} not acknowledged)"
        )
