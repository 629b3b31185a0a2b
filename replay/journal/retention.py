"""How much of the past the journal keeps.

Guarantee: a row goes only when no checkpoint that can be resumed from needs it; of the others the newest stay, up to so
many bytes and so long. Of the policies those stay that steps of these rows began with or made. The file gives freed pages back to
the disk. What it costs follows from what has arrived and what is deleted since the time before, not from how much is kept.
"""

import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from replay.journal.writer import Journal

_ROWS_PER_TRANSACTION = 256  # so that an acknowledgement never waits long for a deletion
_ROWS_PER_COUNT = 1024  # nor for a count
_PAGES_PER_TRANSACTION = 1024
_MAX_DEAD_LETTERS = 100_000
_SETTLED = """
(seq <= :seq AND NOT (
    outcome = 'accepted' AND (dropped IS NULL OR dropped = 'quarantined') AND (last_step IS NULL OR last_step > :step)
))"""  # without the row of a quarantined group, an older checkpoint would send its prompt out again
_OLDEST_STEP = """min(
    :step + 1,
    coalesce((SELECT min(step) FROM groups WHERE last_step = (SELECT min(last_step) FROM groups)), :step + 1),
    coalesce((SELECT min(step) FROM replays), :step + 1)
)"""  # that a group or a replay is of, or a checkpoint goes on with
_OLDEST = {
    "policies": f"SELECT version FROM policies WHERE step < {_OLDEST_STEP} ORDER BY step DESC, version DESC LIMIT 1",
    "cuts": f"SELECT step FROM cuts WHERE step <= {_OLDEST_STEP} ORDER BY step DESC LIMIT 1",
    "advantages": f"SELECT {_OLDEST_STEP}",
}
"""The key of the oldest row that is needed: with which that step began, and how it was cut or the one before it."""


@dataclass(eq=False)
class Retention:
    """Belongs to one thread of the process that writes the journal; nobody else deletes groups."""

    journal: Journal
    _counted_to: int = 0  # a sequence number: no row up to it is needed any more
    _counted_bytes: int = 0  # of those rows

    def prune(
        self, *, oldest_step: int, oldest_seq: int, replayable: Set[str], keep_bytes: int, keep_age_s: float
    ) -> int:
        """Deletes what is neither needed nor kept for inspection, the oldest first, and returns the number of groups. The
        oldest checkpoint that can be resumed from has `oldest_step` steps and knows the rows up to `oldest_seq`;
        `replayable` are the groups in the replay table of any such checkpoint, or of the run as it is now."""
        journal, needed = self.journal, {"step": oldest_step, "seq": oldest_seq}
        excess = self._kept_bytes(needed) - keep_bytes
        doomed: list[tuple[int, int]] = []
        too_old = time.time() - keep_age_s
        for seq, group_id, num_bytes, accepted_at in self._oldest_first(needed):
            if excess <= 0 and accepted_at >= too_old:
                break
            excess -= num_bytes
            if group_id not in replayable:
                doomed.append((seq, num_bytes))
        for start in range(0, len(doomed), _ROWS_PER_TRANSACTION):
            self._delete(doomed[start : start + _ROWS_PER_TRANSACTION])
        self._delete_older("policies", "version", oldest_step)
        self._delete_older("cuts", "step", oldest_step)
        self._delete_older("advantages", "step", oldest_step)
        with journal.transaction() as db:
            newest = "(SELECT max(id) FROM dead_letters)"
            db.execute(f"DELETE FROM dead_letters WHERE id <= {newest} - ?", (_MAX_DEAD_LETTERS,))
        while journal.query("PRAGMA freelist_count")[0][0] > 0:
            journal.query(f"PRAGMA incremental_vacuum({_PAGES_PER_TRANSACTION})")
        return len(doomed)

    def _kept_bytes(self, needed: dict[str, int]) -> int:
        """Of all rows that no checkpoint needs. Counts each row once: what is not needed will not be needed again."""
        page = f"SELECT seq, num_bytes, {_SETTLED} AS settled FROM groups WHERE seq > :after ORDER BY seq LIMIT :rows"
        while True:
            bindings = needed | {"after": self._counted_to, "rows": _ROWS_PER_COUNT}
            count = f"SELECT count(*), max(seq), sum(num_bytes), min(settled) FROM ({page})"
            ((num_rows, last, num_bytes, all_settled),) = self.journal.query(count, bindings)
            if num_rows < _ROWS_PER_COUNT or not all_settled:
                break
            self._counted_to, self._counted_bytes = last, self._counted_bytes + num_bytes
        rest = f"SELECT coalesce(sum(num_bytes), 0) FROM groups WHERE seq > :after AND {_SETTLED}"
        return self._counted_bytes + int(self.journal.query(rest, bindings)[0][0])

    def _oldest_first(self, needed: dict[str, int]) -> Iterator[Any]:
        sql = (
            f"SELECT seq, group_id, num_bytes, accepted_at FROM groups WHERE seq > :after AND {_SETTLED}"
            " ORDER BY seq LIMIT :rows"
        )
        after = 0
        while page := self.journal.query(sql, needed | {"after": after, "rows": _ROWS_PER_TRANSACTION}):
            yield from page
            after = page[-1][0]

    def _delete(self, rows: list[tuple[int, int]]) -> None:
        seqs = [(seq,) for seq, _ in rows]
        with self.journal.transaction() as db:
            of_it = "group_id = (SELECT group_id FROM groups WHERE seq = ?)"
            db.executemany(f"DELETE FROM replays WHERE {of_it}", seqs)
            for table in ("bodies", "missing_rewards", "groups"):
                db.executemany(f"DELETE FROM {table} WHERE seq = ?", seqs)
        self._counted_bytes -= sum(num_bytes for seq, num_bytes in rows if seq <= self._counted_to)

    def _delete_older(self, table: str, key: str, oldest_step: int) -> None:
        """Rows before the oldest that is needed."""
        for (oldest,) in self.journal.query(_OLDEST[table], {"step": oldest_step}):
            doomed = self.journal.query(f"SELECT {key} FROM {table} WHERE {key} < ?", (oldest,))
            for start in range(0, len(doomed), _ROWS_PER_TRANSACTION):
                with self.journal.transaction() as db:
                    part = doomed[start : start + _ROWS_PER_TRANSACTION]
                    db.executemany(f"DELETE FROM {table} WHERE {key} = ?", part)
