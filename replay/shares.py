"""The places of environments: how many leases in flight each may have, so that a slow one cannot have them all.

Guarantee: an environment has as many places as its share of an epoch's prompts, at least one. Where several versions may be in
flight, the others can always fill a step. When all have theirs, what is left is lent.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from replay.staleness import StalenessBudget

MOST_PUT_OFF = 1024
"""Prompts of an environment that may wait for a place of it. Then the others wait too, so that the mix of an epoch holds."""


@dataclass(frozen=True)
class EnvironmentShares:
    """The shares of a run with several environments: of each its part of an epoch's prompts, by name."""

    parts: Mapping[str, float]
    budget: StalenessBudget

    def places(self, capacity: int) -> dict[str, float]:
        """Return the places of each environment, of producers that take `capacity` leases."""
        step, most = self.budget.groups_per_step, self.budget.most_pending
        limit = most - step if most > step else most
        total = min(capacity, most)
        return {name: max(1.0, min(part * total, limit)) for name, part in self.parts.items()}

    def full(self, in_flight: Mapping[str, int], capacity: int) -> frozenset[str]:
        """Return the environments that have all their places; none if all have, because what is left is lent."""
        full = {name for name, places in self.places(capacity).items() if in_flight.get(name, 0) >= places}
        return frozenset(full if len(full) < len(self.parts) else ())
