"""The columns of the index, kept as those of the journal.

Guarantee: a group that is in the journal gets its row with the next pass, oldest first. A change of the trainer's is followed
within seconds while the group is among the newest or not trained yet. Otherwise the sweep follows it, a part of the journal at a
time. Unchanged rows are not written again. A group that retention deleted leaves the index, and its words with it.
"""

from collections.abc import Sequence

import apsw

from replay.journal.reader import JournalReader
from replay.journal.schema import STATES, GroupRow
from slipstream_extras.view.index.cache import answer

VERDICTS = ("failed", "solved", "mixed", "unscored")
UNSCORED, NO_STEP = -1e300, 0  # in place of NULL, so that all rows can be ordered
_CHUNK = 2_000  # rows of one transaction
_COLUMNS = (
    "state",
    "verdict",
    "step",
    "last_step",
    "version",
    "reward",
    "tokens",
    "prompt",
    "producer",
    "replays",
    "arrived",
)
_UPSERT = (
    f"INSERT INTO groups(seq, {', '.join(_COLUMNS)}) VALUES(?{', ?' * len(_COLUMNS)}) ON CONFLICT(seq) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
    + f" WHERE ({', '.join(_COLUMNS)}) IS NOT ({', '.join(f'excluded.{name}' for name in _COLUMNS)})"  # writes no row as it is
)


class RowIndex:
    """Write the table `groups`. Belongs to one thread."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._swept = 0  # rows up to this one were compared in this pass
        self._producers: dict[str, int] = {
            name: number for number, name in answer(db, "SELECT id, name FROM producers")
        }

    @property
    def last_seq(self) -> int:
        return int(answer(self._db, "SELECT coalesce(max(seq), 0) FROM groups")[0][0])

    def add_new(self, reader: JournalReader) -> bool:
        """Add one chunk of new groups; returns whether there may be more."""
        new = reader.seqs(after=self.last_seq, limit=_CHUNK)
        if new:
            self._put(list(reader.rows_between(new[0], new[-1])))
        return bool(new)

    def follow(self, reader: JournalReader) -> None:
        """Compare rows that are likely to change: groups that are not trained yet, and the newest."""
        newest = self.last_seq
        waiting = "SELECT seq FROM groups WHERE state < 2 AND seq <= ? ORDER BY seq LIMIT ?"
        unsettled = [seq for (seq,) in answer(self._db, waiting, (newest - _CHUNK, _CHUNK))]
        self._put(reader.rows_of(unsettled))
        self._compare(reader, newest - _CHUNK, newest)
        oldest, _ = reader.bounds()
        self._delete("seq < ?", (oldest,))

    def sweep(self, reader: JournalReader) -> None:
        """Compare the next chunk, and begins again behind the last one."""
        chunk = "SELECT seq FROM groups WHERE seq > ? ORDER BY seq LIMIT ?"
        ((end,),) = answer(self._db, f"SELECT max(seq) FROM ({chunk})", (self._swept, _CHUNK))  # noqa: S608
        if end is None:
            self._swept = 0
            return
        self._compare(reader, self._swept + 1, end)
        self._swept = end

    def _compare(self, reader: JournalReader, first: int, last: int) -> None:
        """Make the rows from `first` to `last` those of the journal."""
        rows = list(reader.rows_between(first, last))
        there = {row.seq for row in rows}
        mine = answer(self._db, "SELECT seq FROM groups WHERE seq BETWEEN ? AND ?", (first, last))
        self._put(rows)
        for (seq,) in mine:
            if seq not in there:
                self._delete("seq = ?", (seq,))

    def _put(self, rows: Sequence[GroupRow]) -> None:
        if rows:
            with self._db:
                self._db.executemany(_UPSERT, [self._values(row) for row in rows])

    def _delete(self, where: str, bindings: tuple[int, ...]) -> None:
        with self._db:
            self._db.execute(f"DELETE FROM texts WHERE rowid IN (SELECT seq FROM groups WHERE {where})", bindings)  # noqa: S608
            self._db.execute(f"DELETE FROM groups WHERE {where}", bindings)  # noqa: S608

    def _values(self, row: GroupRow) -> tuple[int | float | None, ...]:
        return (
            row.seq, STATES.index(row.state), VERDICTS.index(row.verdict) if row.verdict in VERDICTS else None,
            row.step or NO_STEP, row.last_step or NO_STEP, row.policy_version,
            UNSCORED if row.reward is None else row.reward, row.num_tokens, row.prompt_id, self._producer(row.producer),
            row.num_replays, row.accepted_at,
        )  # fmt: skip

    def _producer(self, name: str) -> int:
        if name not in self._producers:
            self._db.execute("INSERT INTO producers(name) VALUES(?)", (name,))
            self._producers[name] = self._db.last_insert_rowid()
        return self._producers[name]
