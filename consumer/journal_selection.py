"""Which rows a command of `rl-journal` is about: groups by filter, and the uses of groups that stood in again.

Guarantee: rows come in the order of arrival, uses in the order of training; memory is bounded by the number of groups
asked for.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from replay.journal_reader import GroupFilter, GroupRow, JournalReader

VERDICTS = ("failed", "solved", "mixed", "unscored")  # as in replay.rerolls, which this command need not import


@dataclass(frozen=True)
class Selection:
    """Groups. What is None does not matter; bounds are inclusive.

    Args:
        newest: only so many of them, the newest; 0 for all.
        replays: times that a group stood in.
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
        """How many groups there are, at most."""
        total = reader.count(self.wanted)
        return min(total, self.newest or total)

    def _has(self, row: GroupRow) -> bool:
        low, high = self.replays or (row.num_replays, row.num_replays)
        return self.verdict in (None, row.verdict) and low <= row.num_replays <= high


class Use(NamedTuple):
    """A group stood in again."""

    step: int
    position: int
    last_step: int
    group_id: str
    tries: int


_USES = """SELECT step, position, last_step, group_id, tries FROM replays
    WHERE (:group IS NULL OR group_id = :group) AND (:only IS NULL OR step = :only)
    AND (step, position) > (:after_step, :after_position) ORDER BY step, position LIMIT 1000"""


def uses(reader: JournalReader, *, of_group: str | None = None, of_step: int | None = None) -> Iterator[Use]:
    """All of them, those of one group, or those in the batch that begins with one step."""
    last = (-1, -1)
    while page := reader._query(
        _USES, {"group": of_group, "only": of_step, "after_step": last[0], "after_position": last[1]}
    ):
        yield from (Use(*row) for row in page)
        last = page[-1][:2]
