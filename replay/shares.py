"""The places of environments: how many leases in flight each may have, so that a slow one cannot have them all.

Guarantee: an environment has as many places as its share of the newest prompts, at least one. Where several versions may be in
flight, the others can always fill a step. When all have theirs, what is left is lent.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from replay.staleness import StalenessBudget

MOST_PUT_OFF = 1024
"""Prompts of an environment that may wait for a place of it. Then the others wait too, so that the mix of an epoch holds."""


NEWEST = 1024
"""Prompts, asked last or put off, whose environments tell what part each has of those that are asked."""
_FEW = 64  # newest prompts; as long as there are fewer, those of a whole epoch count for the others
_BACKLOG = 0.5  # of its places, that an environment gets in addition while `MOST_PUT_OFF` of its prompts wait


@dataclass(frozen=True)
class EnvironmentShares:
    """The shares of a run with several environments: of each its part of an epoch's prompts, by name."""

    parts: Mapping[str, float]
    budget: StalenessBudget

    def without(self, name: str) -> "EnvironmentShares":
        """Return the shares of the others, to whom that of an environment goes."""
        left = {other: part for other, part in self.parts.items() if other != name}
        return EnvironmentShares({other: part / sum(left.values()) for other, part in left.items()}, self.budget)

    def places(self, capacity: int, newest: Mapping[str, int], waiting: Mapping[str, int]) -> dict[str, float]:
        """Return the places of each environment, of producers that take `capacity` leases. `newest` counts the newest prompts,
        `waiting` those that were put off."""
        step, most = self.budget.groups_per_step, self.budget.most_pending
        total, known = min(capacity, most), sum(newest.get(name, 0) for name in self.parts)
        limit = min(total - len(self.parts) + 1, most - step if most > step else most)
        prior = max(0, _FEW - known)
        found = {}
        for name, part in self.parts.items():
            places = (prior * part + newest.get(name, 0)) / (prior + known) * total
            places *= 1.0 + _BACKLOG * waiting.get(name, 0) / MOST_PUT_OFF
            found[name] = max(1.0, min(places, limit))
        return found

    def full(
        self, in_flight: Mapping[str, int], capacity: int, newest: Mapping[str, int], waiting: Mapping[str, int]
    ) -> frozenset[str]:
        """Return the environments that have all their places; none if all have, because what is left is lent."""
        places = self.places(capacity, newest, waiting)
        full = {name for name, most in places.items() if in_flight.get(name, 0) >= most}
        return frozenset(full if len(full) < len(self.parts) else ())
