"""Groups that wait to be trained for the first time: a queue, because leases bound staleness by the order of arrival.

Guarantee: `first` takes nothing away; a group leaves by `remove` alone, after the journal knows why.
"""

import itertools
from collections import deque
from collections.abc import Iterable

from replay.groups import RolloutGroup


class FifoTable:
    def __init__(self) -> None:
        self._groups: deque[RolloutGroup] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def insert(self, group: RolloutGroup) -> None:
        self._groups.append(group)

    def older_than(self, version: int) -> list[RolloutGroup]:
        """The groups of versions below `version`."""
        return [group for group in self._groups if group.policy_version < version]

    def first(self, num_groups: int) -> list[RolloutGroup]:
        """Those that came first, at most `num_groups`."""
        return list(itertools.islice(self._groups, num_groups))

    def remove(self, groups: Iterable[RolloutGroup]) -> None:
        gone = {group.group_id for group in groups}
        self._groups = deque(group for group in self._groups if group.group_id not in gone)
