"""Which groups a command of `rl-journal` is about.

Guarantee: rows come in the order of arrival; memory is bounded by the number of groups asked for.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from replay.journal.reader import JournalReader
from replay.journal.rows import GroupFilter, GroupRow

VERDICTS = ("failed", "solved", "mixed", "unscored")  # as in replay.prompts.rerolls, which this command need not import


@dataclass(frozen=True)
class Selection:
    """Which groups are meant. What is None does not matter; bounds are inclusive.

    Args:
        newest: how many groups, of which the newest are taken; 0 for all.
        replays: how often a group was replayed.
    """

    wanted: GroupFilter
    newest: int = 0
    verdict: str | None = None
    replays: tuple[int, int] | None = None

    def rows(self, reader: JournalReader) -> Iterator[GroupRow]:
        if self.verdict is None and self.replays is None:
            return reader.rows(self.wanted, newest=self.newest)
        found = (row for row in reader.rows(self.wanted) if self._has(row))
        return iter(deque(found, self.newest)) if self.newest else found

    def most(self, reader: JournalReader) -> int:
        """An upper bound of the number of groups."""
        total = reader.count(self.wanted)
        return min(total, self.newest or total)

    def _has(self, row: GroupRow) -> bool:
        low, high = self.replays or (row.num_replays, row.num_replays)
        return self.verdict in (None, row.verdict) and low <= row.num_replays <= high
