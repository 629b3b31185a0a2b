"""The producers that said hello, as last heard of, and who of them has room for work.

Guarantee: a lease that a producer does not name in two heartbeats in a row counts as lost, and only then.
"""

from dataclasses import dataclass, field

from protocol.messages import Heartbeat


@dataclass
class ProducerSession:
    """One producer."""

    name: str
    capacity: int
    last_heard: float  # of the caller's clock, seconds
    leases: set[str] = field(default_factory=set)
    heartbeat: Heartbeat | None = None
    _absent: set[str] = field(default_factory=set)  # leases that its last heartbeat did not name

    @property
    def room(self) -> int:
        """Leases that it would still take."""
        return self.capacity - len(self.leases)

    def note(self, heartbeat: Heartbeat) -> set[str]:
        """Takes its report and returns the leases that are lost: they, or their answers, never arrived (an answer may be
        under way for one heartbeat)."""
        self.heartbeat = heartbeat
        self.capacity = heartbeat.capacity
        absent = self.leases - set(heartbeat.held)
        lost = absent & self._absent
        self._absent = absent - lost
        self.leases -= lost
        return lost

    def describe(self, now: float) -> str:
        """What it is doing, in words."""
        beat = self.heartbeat
        if beat is None:
            return f"{self.name} (no heartbeat yet)"
        return (
            f"{self.name} (policy v{beat.policy_version}, heard {now - self.last_heard:.1f} s ago, {len(self.leases)} leases: "
            f"{beat.waiting} waiting, {beat.generating} generating, {beat.scoring} scoring, {beat.unacked} not acknowledged)"
        )
