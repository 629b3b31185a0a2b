"""Groups that wait for a lease, and leases that wait for a group.

Guarantee: a group goes to one lease, whose floor is not above the policy that sampled it, and leases are served in order.
Groups wait only while no lease does, and their number is bounded. A group that is too old for every waiting lease is stale.
"""

from collections import deque

from producer.groups import Rollouts
from producer.interfaces import LeaseFailure
from producer.waiting_line import WaitingLine


class QueueFullError(Exception):
    """No lease waits, and too many groups do."""


class GroupQueue:
    """See the module's guarantee. `leased`, `stale` and `void` count what became of groups that were offered."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: deque[Rollouts] = deque()
        self._leases = WaitingLine[int, Rollouts]()  # with their floors
        self._trainers = 1  # that have given leases
        self.leased = self.stale = self.void = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_leases(self) -> int:
        return len(self._leases.wishes)

    @property
    def floor(self) -> int:
        """The oldest policy that a waiting lease takes; 0 if none waits."""
        return min(self._leases.wishes, default=0)

    def offer(self, group: Rollouts) -> None:
        """Raises QueueFullError if there is no room for it now; nothing has changed then."""
        floors = self._leases.wishes
        place = next((place for place, floor in enumerate(floors) if floor <= group.policy_version), None)
        if place is not None:
            self._leases.give(group, place)
            self.leased += 1
        elif floors:
            self.stale += 1
        elif len(self._groups) < self._max_groups:
            self._groups.append(group)
        else:
            raise QueueFullError

    async def take(self, floor: int) -> Rollouts:
        """Returns the group of a lease: the longest waiting one that is not older than `floor`, or the next one offered."""
        for group in self._groups:
            if group.policy_version >= floor:
                self._groups.remove(group)
                self.leased += 1
                return group
        self.stale += len(self._groups)
        self._groups.clear()
        trainer = self._trainers
        return await self._leases.wait(floor, take_back=lambda group: self._return(group, trainer))

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
        self._leases.refuse(LeaseFailure("returned", "the trainer is another process now"))

    def _return(self, group: Rollouts, trainer: int) -> None:
        """Takes a group back from a lease that was cancelled. It was queued before, so there is room for it."""
        self.leased -= 1
        if trainer != self._trainers:
            self.void += 1
        elif self._leases.wishes:
            self.offer(group)
        else:
            self._groups.appendleft(group)
