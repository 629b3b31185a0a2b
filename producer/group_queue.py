"""Groups that wait for a lease, and leases that wait for a group.

Guarantee: a group goes to one lease, whose floor is not above the policy that sampled it, and leases are served in order.
Groups wait only while no lease does, so many at most; one that the waiting leases are all too new for is stale.
"""

import asyncio
from collections import deque
from typing import Literal

from producer.interfaces import LeaseFailure
from protocol.messages import Group


class QueueFullError(Exception):
    """No lease waits, and too many groups do."""


class GroupQueue:
    """See the module's guarantee. `leased`, `stale` and `void` count what became of groups that were offered."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: deque[Group] = deque()
        self._leases: deque[tuple[int, asyncio.Future[Group]]] = deque()
        self.leased = self.stale = self.void = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_leases(self) -> int:
        """That wait."""
        return len(self._leases)

    @property
    def floor(self) -> int:
        """The oldest policy that a waiting lease takes; 0 if none waits."""
        return min((floor for floor, _ in self._leases), default=0)

    @property
    def is_full(self) -> bool:
        return not self._leases and len(self._groups) >= self._max_groups

    def offer(self, group: Group) -> Literal["leased", "queued", "stale"]:
        """
        Raises:
            QueueFullError: nothing has changed; offer it later.
        """
        if self.is_full:
            raise QueueFullError
        if not self._leases:
            self._groups.append(group)
            return "queued"
        for entry in self._leases:
            floor, lease = entry
            if floor <= group.policy_version and not lease.done():
                self._leases.remove(entry)
                lease.set_result(group)
                self.leased += 1
                return "leased"
        self.stale += 1
        return "stale"

    async def take(self, floor: int) -> Group:
        """The group of a lease: the longest waiting one that is not older than `floor`, or the next one offered."""
        for group in self._groups:
            if group.policy_version >= floor:
                self._groups.remove(group)
                self.leased += 1
                return group
        self.stale += len(self._groups)
        self._groups.clear()
        lease: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        entry = (floor, lease)
        self._leases.append(entry)
        try:
            return await lease
        except asyncio.CancelledError:
            if entry in self._leases:
                self._leases.remove(entry)
            elif lease.exception() is None:  # given just before
                self.leased -= 1
                self._return(lease.result())
            raise

    def drop_older(self, version: int) -> None:
        """No lease will take what an older policy sampled."""
        kept = [group for group in self._groups if group.policy_version >= version]
        self.stale += len(self._groups) - len(kept)
        self._groups = deque(kept)

    def forget(self) -> None:
        """Versions mean other weights from now on: groups are void, and leases go back, because of their floors."""
        self.void += len(self._groups)
        self._groups.clear()
        for _, lease in self._leases:
            if not lease.done():
                lease.set_exception(LeaseFailure("returned", "the trainer is another process now"))
        self._leases.clear()

    def _return(self, group: Group) -> None:
        """It was here before, so it is never one too many."""
        if self._leases:
            self.offer(group)
        else:
            self._groups.appendleft(group)
