"""The connection to a journal's file of the one process that writes it.

Guarantee: when a transaction returns, what it wrote survives a crash of the process and of the machine (SQLite, write-ahead
log, `synchronous=FULL`); when it raises, nothing of it happened. A full disk raises `JournalFullError`, and the same call may
be tried again. Any other I/O error is final, because after a failed fsync nobody knows what is on the disk: every further call
is refused, the process ends, and the next one starts from what the disk really holds.
"""

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import apsw

from protocol.errors import ExitCode, JournalError
from protocol.runtime.files import sync
from replay.journal.tables import SCHEMA, TABLES


class JournalFullError(JournalError):
    """The disk is full. Nothing was written; the same call may succeed later."""


class JournalInUseError(JournalError):
    """Another process writes this journal."""

    exit_code = ExitCode.ENDPOINT_IN_USE


class Database:
    """See the module's guarantee. The file, with its folder, is created if it is not there. `observe_commit_s` is told how long
    every commit took.

    Raises:
        JournalError: the file is damaged, or of another release.
        JournalInUseError: another process writes it.
    """

    def __init__(self, path: Path, observe_commit_s: Callable[[float], None] = lambda _: None) -> None:
        self.path = path
        self._observe_commit_s = observe_commit_s
        self._mutex = threading.Lock()
        self._failure: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file_lock = _lock(path)
        try:
            self._db = self._open()
        except BaseException:
            self._file_lock.close()
            raise

    def _open(self) -> apsw.Connection:
        with self._errors():
            db = apsw.Connection(str(self.path))
            db.set_busy_timeout(10_000)
            version = db.pragma("user_version")
            if version not in (0, SCHEMA):
                raise JournalError(
                    f"{self.path} has journal schema {version}, this release writes {SCHEMA}; use its release"
                )
            if version == 0:
                db.pragma("auto_vacuum", "incremental")
            db.pragma("journal_mode", "wal")
            db.pragma("synchronous", "full")
            for statement in filter(str.strip, TABLES.split(";")):
                db.execute(statement)
            if version == 0:
                db.pragma("user_version", SCHEMA)
            sync(self.path.parent)
            return db

    def complaint(self) -> str | None:
        """Why it refuses every call, if it does."""
        return self._failure

    def close(self) -> None:
        with self._mutex:
            try:
                if self._failure is not None:  # closing would copy the log into the file, and delete the log
                    self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                self._db.close()
            finally:
                self._file_lock.close()

    def query(self, sql: str, bindings: tuple[Any, ...] | dict[str, Any] = ()) -> list[Any]:
        with self._mutex, self._errors():
            return self._db.execute(sql, bindings).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """Commits what the block did, or nothing of it."""
        with self._mutex, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                started = time.monotonic()
                self._db.execute("COMMIT")
                self._observe_commit_s(time.monotonic() - started)
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        if self._failure is not None:
            raise JournalError(self._failure)
        try:
            yield
        except apsw.FullError as error:
            raise JournalFullError(
                f"the disk of {self.path} is full; make room, or move run_dir to a larger one"
            ) from error
        except (apsw.CorruptError, apsw.NotADBError) as error:
            self._failure = (
                f"{self.path} is damaged ({error}); see slipstream journal verify, or restore a copy of run_dir"
            )
            raise JournalError(self._failure) from error
        except apsw.Error as error:
            self._failure = f"{self.path} cannot be written or read ({error}); look at the disk, then start again"
            raise JournalError(self._failure) from error


def _lock(path: Path) -> BinaryIO:
    """Locks the journal until the file returned is closed, or the process ends."""
    stream = Path(f"{path}.lock").open("ab")  # noqa: SIM115  open as long as the journal is
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise JournalInUseError(
            f"another rl-trainer is at work in {path.parent}; stop it, or choose another run_dir"
        ) from None
    return stream
