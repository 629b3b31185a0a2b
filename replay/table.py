"""The replay table, first form: a queue. Groups leave in the order they came and are trained once.

Guarantee: `cut` returns a full batch or nothing, never a group older than asked for; what is too old comes out beside it
and is never dropped silently.
"""

from collections import deque

from replay.groups import RolloutGroup


class FifoTable:
    def __init__(self) -> None:
        self._groups: deque[RolloutGroup] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def insert(self, group: RolloutGroup) -> None:
        self._groups.append(group)

    def evict_older_than(self, version: int) -> list[RolloutGroup]:
        """Removes and returns the groups of versions below `version`."""
        stale = [group for group in self._groups if group.policy_version < version]
        if stale:
            self._groups = deque(group for group in self._groups if group.policy_version >= version)
        return stale

    def cut(self, num_groups: int) -> list[RolloutGroup] | None:
        """Removes and returns the oldest `num_groups` groups; None if there are fewer."""
        if len(self._groups) < num_groups:
            return None
        return [self._groups.popleft() for _ in range(num_groups)]
