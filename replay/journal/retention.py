"""Bounds how much of the past the journal keeps, and how much of the disk a run may fill.

Guarantee: a row goes only when no checkpoint that can be resumed from needs it; of the others the newest stay, within a number of
bytes and an age. Policies stay that steps of these rows began with or made. The file gives freed pages back to the disk. The cost
follows from the rows that arrived and are deleted since the time before, not from the rows that are kept. `DiskGuard.has_room` is
False while the disk is fuller than allowed, and recovers by itself; a reserve file stands by so that, on a full disk, task in
progress can finish and old rows can be deleted.
"""

import logging
import os
import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.journal.writer import Journal

logger = logging.getLogger(__name__)

RESERVE_BYTES = 4 * 2**20


class DiskGuard:
    """Watches the room on the disk of a run. `folder` is any folder of the disk, `max_used` a share of it, 0 to 1."""

    def __init__(self, folder: Path, max_used: float) -> None:
        self._folder = folder
        self.max_used = max_used
        self._reserve = folder / "journal.reserve"
        self.has_room = True
        self.check()

    @property
    def used(self) -> float:
        """The share of the disk that cannot be written to any more, as `df` counts it."""
        usage = shutil.disk_usage(self._folder)
        return 1.0 - usage.free / max(1, usage.used + usage.free)

    def complaint(self) -> str | None:
        """Return the problem in words, or None."""
        if self.has_room:
            return None
        return f"{self.used:.0%} full, no leases are given above {self.max_used:.0%} (replay.max_disk_used)"

    def check(self) -> None:
        """Check the disk, and log a change."""
        had_room, self.has_room = self.has_room, self.used <= self.max_used
        if self.has_room and not had_room:
            logger.info("the disk of run_dir is %.0f%% full: leases are given again", 100 * self.used)
        elif had_room and not self.has_room:
            text = "the disk of run_dir is %.0f%% full: no leases until there is room (replay.max_disk_used)"
            logger.warning(text, 100 * self.used)
        if self.has_room and not self._reserve.exists():
            self._keep_reserve()

    def spend_reserve(self) -> None:
        """The disk is full: gives the reserve to work that must finish."""
        self._reserve.unlink(missing_ok=True)

    def _keep_reserve(self) -> None:
        try:
            with self._reserve.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)
        except OSError:  # less room than we thought: the next look tries again
            self._reserve.unlink(missing_ok=True)


_ROWS_PER_TRANSACTION = 256  # so that an acknowledgement never waits long for a deletion
_ROWS_PER_COUNT = 1024  # nor for a count
_PAGES_PER_TRANSACTION = 1024
_MAX_DEAD_LETTERS = 100_000
_MAX_DRAWS = 65_536  # blocks of prompts, more than a checkpoint goes back
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
    "plans": f"SELECT step FROM plans WHERE step <= {_OLDEST_STEP} ORDER BY step DESC LIMIT 1",
    "advantages": f"SELECT {_OLDEST_STEP}",
}
"""The key of the oldest row that is needed: the policy with which that step began, and its plan or the one before it."""


@dataclass(eq=False)
class Retention:
    """Deletes old groups. One thread of the process that writes the journal owns it and alone deletes groups."""

    journal: Journal
    _counted_to: int = 0  # a sequence number: no row up to it is needed any more
    _counted_bytes: int = 0  # of those rows

    def prune(
        self, *, oldest_step: int, oldest_seq: int, replayable: Set[str], keep_bytes: int, keep_age_s: float
    ) -> int:
        """Delete what is neither needed nor kept for inspection, the oldest first, and returns the number of groups. The
        oldest checkpoint that can be resumed from has `oldest_step` steps and knows the rows up to `oldest_seq`;
        `replayable` are the groups in the replay table of any such checkpoint, or of the run as it is now."""
        journal, needed = self.journal, {"step": oldest_step, "seq": oldest_seq}
        excess = self._kept_bytes(needed) - keep_bytes
        doomed: list[tuple[int, int]] = []
        too_old = time.time() - keep_age_s
        for seq, lease_id, num_bytes, accepted_at in self._oldest_first(needed):
            if excess <= 0 and accepted_at >= too_old:
                break
            excess -= num_bytes
            if lease_id not in replayable:
                doomed.append((seq, num_bytes))
        for start in range(0, len(doomed), _ROWS_PER_TRANSACTION):
            self._delete(doomed[start : start + _ROWS_PER_TRANSACTION])
        self._delete_older("policies", "version", oldest_step)
        self._delete_older("plans", "step", oldest_step)
        self._delete_older("advantages", "step", oldest_step)
        with journal.transaction() as db:
            newest = "(SELECT max(id) FROM dead_letters)"
            db.execute(f"DELETE FROM dead_letters WHERE id <= {newest} - ?", (_MAX_DEAD_LETTERS,))
            db.execute("DELETE FROM draws WHERE id <= (SELECT max(id) FROM draws) - ?", (_MAX_DRAWS,))
        while journal.query("PRAGMA freelist_count")[0][0] > 0:
            journal.query(f"PRAGMA incremental_vacuum({_PAGES_PER_TRANSACTION})")
        return len(doomed)

    def _kept_bytes(self, needed: dict[str, int]) -> int:
        """Return the bytes of all rows that no checkpoint needs. Counts each row once: a row never becomes needed again."""
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
            f"SELECT seq, lease_id, num_bytes, accepted_at FROM groups WHERE seq > :after AND {_SETTLED}"
            " ORDER BY seq LIMIT :rows"
        )
        after = 0
        while page := self.journal.query(sql, needed | {"after": after, "rows": _ROWS_PER_TRANSACTION}):
            yield from page
            after = page[-1][0]

    def _delete(self, rows: list[tuple[int, int]]) -> None:
        seqs = [(seq,) for seq, _ in rows]
        with self.journal.transaction() as db:
            of_it = "lease_id = (SELECT lease_id FROM groups WHERE seq = ?)"
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
