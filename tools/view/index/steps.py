"""The lines of `steps.jsonl` in the index, so that a long run's are not read anew for every page.

Guarantee: lines are read once, as they are written. When the trainer cut the file back or began another one, all are read again,
so that steps that a crash undid leave no row.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import apsw

from protocol.files.rotated_lines import opened
from tools.run_reader import STEPS, parsed_lines

_CHUNK_BYTES = 8 * 2**20
_TAIL = 256


class StepIndex:
    """Writes the table `steps`. Belongs to one thread."""

    def __init__(self, db: apsw.Connection, folder: Path) -> None:
        self._db = db
        self._path = folder / STEPS
        self._inode, self._position, self._tail = 0, 0, b""  # of the newer file; the last bytes that were read of it

    def add_new(self) -> bool:
        """Reads on, a part of the file at a time; returns whether there may be more."""
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
        """Whether the file is the one that was read, with more lines behind."""
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
            (line["step"], line.get("t"), json.dumps(line))
            for line in parsed_lines(lines)
            if isinstance(line.get("step"), int)
        ]
        if rows:
            with self._db:
                self._db.executemany("INSERT OR REPLACE INTO steps VALUES(?, ?, ?)", rows)


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line."""
    return {
        name: value for name, value in line.items() if isinstance(value, int | float) and math.isfinite(value)
    }  # fmt: skip
