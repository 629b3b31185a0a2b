"""The file of the index, in the user's cache, one for each journal.

Guarantee: a damaged file, and one of another release or of another run at the same place, is thrown away and built again, also
by its readers. One process builds an index, other viewers of the run read it. No page waits longer
than `_LONGEST_S` for its statements. An index that was neither built nor read for `_UNUSED_DAYS` is removed.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import apsw

_SCHEMA = 4
_LONGEST_S = 5.0
_UNUSED_DAYS = 30
_DAY_S = 86_400
_NAME = re.compile(r"[0-9a-f]{16}\.sqlite")
_TABLES = """
CREATE TABLE facts(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups(seq INTEGER PRIMARY KEY, state INTEGER, verdict INTEGER, step INTEGER, last_step INTEGER, version INTEGER,
    reward REAL, tokens INTEGER, prompt INTEGER, producer INTEGER, replays INTEGER, arrived REAL, scoring_s REAL,
    longest INTEGER, truncated INTEGER, spread REAL);
CREATE INDEX groups_by_reward ON groups(reward, seq);
CREATE INDEX groups_by_tokens ON groups(tokens, seq);
CREATE INDEX groups_by_version ON groups(version, seq);
CREATE INDEX groups_by_step ON groups(step, seq);
CREATE INDEX groups_by_prompt ON groups(prompt, seq);
CREATE INDEX groups_unsettled ON groups(seq) WHERE state < 2;
CREATE TABLE producers(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE steps(step INTEGER PRIMARY KEY, t REAL, wait_s REAL, step_s REAL, line TEXT NOT NULL);
CREATE INDEX steps_by_time ON steps(t);
CREATE VIRTUAL TABLE texts USING fts5(text, content='', contentless_delete=1, tokenize='unicode61 remove_diacritics 2');
"""


class SlowQueryError(TimeoutError):
    """A question to the index took too long and was ended."""


def place_of(journal: Path) -> Path:
    """Return the place of the index of this journal."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(journal.resolve()).encode()).hexdigest()[:16]
    return cache / "slipstream" / "view" / f"{name}.sqlite"


class DamagedIndexError(Exception):
    """The index was damaged, and is removed."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock the index; the value is whether this process builds it, for as long as the context lasts."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_unused(path.parent)
    with path.with_suffix(".lock").open("ab") as lock:
        yield _taken(lock)


def create(path: Path, run_id: str) -> apsw.Connection:
    """A connection that writes the index of this run; an empty one if the file is not of it."""
    if not _is_of(path, run_id):
        _remove(path)
    db = apsw.Connection(str(path))
    db.set_busy_timeout(10_000)
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", "normal")
    if not db.pragma("user_version"):
        with db:
            db.execute(_TABLES)
            db.execute("INSERT INTO facts VALUES('run_id', ?)", (run_id,))
            db.execute("INSERT INTO texts(texts, rank) VALUES('hashsize', 8388608)")
            db.pragma("user_version", _SCHEMA)
    path.chmod(0o600)
    return db


@contextlib.contextmanager
def opened(path: Path) -> Iterator[apsw.Connection | None]:
    """A connection that reads the index; None if there is none yet. `SlowQueryError` if a statement takes too long,
    `DamagedIndexError` if SQLite cannot read the file."""
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    except apsw.CantOpenError:
        yield None
        return
    _note_use(path)
    with contextlib.closing(connection) as db:
        db.set_busy_timeout(2_000)
        deadline = time.monotonic() + _LONGEST_S
        db.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        try:
            ready = db.pragma("user_version") == _SCHEMA
            yield db if ready else None
        except apsw.InterruptError as error:
            raise SlowQueryError(f"the answer takes more than {_LONGEST_S:g} s; choose fewer groups") from error
        except (apsw.NotADBError, apsw.CorruptError) as error:
            _remove(path)
            raise DamagedIndexError(f"the index of this run is damaged ({error}); it is built again") from error


def answer(db: apsw.Connection, sql: str, bindings: Any = ()) -> list[Any]:
    """Return all rows of an answer that has few."""
    return db.execute(sql, bindings).fetchall()


def _is_of(path: Path, run_id: str) -> bool:
    try:
        with contextlib.closing(apsw.Connection(str(path))) as db:
            if db.pragma("user_version") == 0:
                return False
            found = db.execute("SELECT value FROM facts WHERE name = 'run_id'").fetchall()
            return bool(db.pragma("user_version") == _SCHEMA and found == [(run_id,)])
    except apsw.Error:
        return False


def _remove(path: Path) -> None:
    for suffix in ("-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _taken(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note_use(path: Path) -> None:
    """Keep the time of the last use as the file's time, to the day."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < time.time() - _DAY_S:
            os.utime(path)


def _remove_unused(folder: Path) -> None:
    """Remove indexes that were not used for long and that no process builds now."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(path.name) and path.stat().st_mtime < time.time() - _UNUSED_DAYS * _DAY_S:
                with path.with_suffix(".lock").open("ab") as lock:
                    if _taken(lock):
                        _remove(path)
                        path.with_suffix(".lock").unlink()
