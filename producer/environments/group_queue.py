"""Groups that wait for a lease, and leases that wait for a group.

Guarantee: a group goes to one lease, whose floor is not above the policy that sampled it; of several leases that wait for it, to
the one that has waited longest. The number of groups is bounded. One that is too old for every waiting lease is stale.
"""

import asyncio
from collections import deque

from producer.groups import Rollouts
from producer.interfaces import LeaseFailure


class QueueFullError(Exception):
    """There is no lease for another group, and too many groups wait."""


class GroupQueue:
    """See the module's guarantee. `leased`, `stale` and `void` count what became of groups that were offered."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: deque[Rollouts] = deque()
        self._floors: list[int] = []  # of the leases that wait
        self._changed = asyncio.Event()
        self._trainers = 1  # that have given leases
        self.leased = self.stale = self.void = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_leases(self) -> int:
        return len(self._floors)

    @property
    def floor(self) -> int:
        """The oldest policy that a waiting lease takes; 0 if none waits."""
        return min(self._floors, default=0)

    def offer(self, group: Rollouts) -> None:
        """Raises QueueFullError if there is no room for it now; nothing has changed then."""
        if len(self._groups) >= self._max_groups + len(self._floors):
            raise QueueFullError
        self._groups.append(group)
        self.drop_older(self.floor)
        self._changed.set()

    async def take(self, floor: int) -> Rollouts:
        """Returns the group of a lease: the one that has waited longest of those that are not older than `floor`."""
        trainer = self._trainers
        self._floors.append(floor)
        try:
            while trainer == self._trainers:
                for place, group in enumerate(self._groups):
                    if group.policy_version >= floor:
                        del self._groups[place]
                        self.leased += 1
                        return group
                self.drop_older(self.floor)
                self._changed.clear()
                await self._changed.wait()
            raise LeaseFailure("returned", "the trainer is another process now")
        finally:
            if trainer == self._trainers:
                self._floors.remove(floor)

    def drop_older(self, version: int) -> None:
        """Drops groups of older policies, which no lease will take."""
        kept = [group for group in self._groups if group.policy_version >= version]
        self.stale += len(self._groups) - len(kept)
        self._groups = deque(kept)

    def forget(self) -> None:
        """Is called when versions mean other weights: groups are void, and leases go back, because of their floors."""
        self._trainers += 1
        self.void += len(self._groups)
        self._groups.clear()
        self._floors.clear()
        self._changed.set()
