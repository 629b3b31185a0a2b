"""The lines of `steps.jsonl` in the index, so that a long run's are not read anew for every page.

Guarantee: lines are read once, as they are written. When the trainer cut the file back or began another one, all are read again,
so that steps that a crash undid leave no row.
"""

import os
from pathlib import Path
from typing import Any

import apsw
from msgspec.json import decode

from protocol.runtime.json_lines import encode_line, opened
from slipstream.run_reader import STEPS, parsed_lines
from slipstream_extras.view.index.cache import answer

_CHUNK_BYTES = 8 * 2**20
_TAIL = 256
_MOST = 2**63  # of SQLite's integers


class StepIndex:
    """Write the table `steps`. Belongs to one thread."""

    def __init__(self, db: apsw.Connection, folder: Path) -> None:
        self._db = db
        self._path = folder / STEPS
        self._inode, self._position, self._tail = 0, 0, b""  # of the newer file; the last bytes that were read of it

    def add_new(self) -> bool:
        """Read on, a part of the file at a time; returns whether there may be more."""
        with opened(self._path) as files:
            if not files:
                self._begin_again(0)
                return False
            newest = files[-1]
            if not self._goes_on(newest):
                self._begin_again(os.fstat(newest.fileno()).st_ino)
                for older in files[:-1]:
                    for chunk in iter(lambda: older.readlines(_CHUNK_BYTES), []):  # noqa: B023  used at once
                        self._put(chunk)
            newest.seek(self._position)
            lines = newest.readlines(_CHUNK_BYTES)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._put(whole)
        self._position += sum(map(len, whole))
        self._tail = (self._tail + b"".join(whole[-1:]))[-_TAIL:]
        return bool(whole)

    def _goes_on(self, file: Any) -> bool:
        """Return whether this is the file that was read, with more lines behind."""
        state = os.fstat(file.fileno())
        if state.st_ino != self._inode or state.st_size < self._position:
            return False
        file.seek(self._position - len(self._tail))
        return bool(file.read(len(self._tail)) == self._tail)

    def _begin_again(self, inode: int) -> None:
        self._inode, self._position, self._tail = inode, 0, b""
        self._db.execute("DELETE FROM steps")

    def _put(self, lines: list[bytes]) -> None:
        rows = [
            (line["step"], *(_number(line, name) for name in ("t", "wait_s", "step_s")), encode_line(line))
            for line in parsed_lines(lines)
            if isinstance(line.get("step"), int) and abs(line["step"]) < _MOST
        ]
        if rows:
            with self._db:
                self._db.executemany("INSERT OR REPLACE INTO steps VALUES(?, ?, ?, ?, ?)", rows)


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return value if isinstance(value, int | float) and abs(value) < _MOST else None


def newest_lines(db: apsw.Connection, most: int) -> list[dict[str, Any]]:
    """Return the lines of the newest steps, oldest first."""
    found = answer(db, "SELECT line FROM steps ORDER BY step DESC LIMIT ?", (most,))
    return [decode(line) for (line,) in reversed(found)]


def line_of(db: apsw.Connection, step: int) -> dict[str, Any]:
    """Return the line of one step; empty if there is none."""
    found = answer(db, "SELECT line FROM steps WHERE step = ?", (step,))
    return dict(decode(found[0][0])) if found else {}


def lines_since(db: apsw.Connection, since: float, most: int) -> list[dict[str, Any]]:
    """Return at most `most` lines of the steps that ended after `since` (Unix time), evenly."""
    ((count,),) = answer(db, "SELECT count(*) FROM steps WHERE t >= ?", (since,))
    every = -(-count // most) or 1
    found = answer(db, "SELECT line FROM steps WHERE t >= ? AND step % ? = 0 ORDER BY step", (since, every))
    return [decode(line) for (line,) in found]


def ends(db: apsw.Connection) -> list[dict[str, Any]]:
    """Return the first and the last step, as `times_since` does."""
    return [line for order in ("ASC", "DESC") for line in _times(db, f"ORDER BY step {order} LIMIT 1")]


def times_since(db: apsw.Connection, since: float) -> list[dict[str, Any]]:
    """Return when each of these steps ended, and how long it waited and trained."""
    return _times(db, "WHERE t >= ? ORDER BY step", (since,))


def _times(db: apsw.Connection, which: str, bindings: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    names = ("step", "t", "wait_s", "step_s")
    found = answer(db, f"SELECT {', '.join(names)} FROM steps {which}", bindings)  # noqa: S608
    return [dict(zip(names, row, strict=True)) for row in found]
