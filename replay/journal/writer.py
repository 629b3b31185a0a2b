"""The journal: every answered group on disk, before its producer may forget it.

Guarantee: when a method returns, what it wrote survives a crash of the process and of the machine (SQLite, write-ahead
log, `synchronous=FULL`); when it raises, nothing of it happened. A full disk raises `JournalFullError` and may be tried
again. Any other I/O error is final, because after a failed fsync nobody knows what is on the disk: the journal refuses
every further call, the process ends, and the next one starts from what the disk really holds.

A group's row says what became of it:

    outcome   accepted, no_signal, or stale: the answer that the producer got
    step      first optimizer step (from 1) that trains it, set before the step begins; `last_step` the last one
    tries     times that its steps were begun without the last one ending; 2 of them quarantine the group
    dropped   why an accepted group will not be trained after all: stale, quarantined, or configuration
    verdict   what the judging reward said: failed, solved, mixed or unscored (`replay.prompts.rerolls`)

A group that was trained may stand in again in later steps: each such use is a row of `replays`.

One process writes a journal (a lock file says so), through this one connection; any number may read it
(`replay.journal.reader`).
"""

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import apsw
from isal.isal_zlib import crc32

from protocol.errors import ExitCode, JournalError
from protocol.files.staged import sync

if TYPE_CHECKING:
    from replay.prompts.rerolls import Judgement  # which needs numpy; programs that read a journal do not

Outcome = Literal["accepted", "no_signal", "stale"]
DropReason = Literal["stale", "quarantined", "configuration"]

MAX_TRIES = 2
"""A group that was in the step when the trainer died so many times is quarantined."""

SCHEMA = 1
_MAX_FRAMES, _MAX_FRAME_BYTES = 256, 64 * 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS groups(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL, reroll INTEGER NOT NULL, attempt INTEGER NOT NULL, producer TEXT NOT NULL,
    policy_version INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL,
    verdict TEXT NOT NULL, num_scored INTEGER NOT NULL, num_successes INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, num_bytes INTEGER NOT NULL, accepted_at REAL NOT NULL, crc INTEGER NOT NULL,
    step INTEGER, last_step INTEGER, position INTEGER, tries INTEGER NOT NULL DEFAULT 0, dropped TEXT,
    replayable INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS replays(step INTEGER NOT NULL, position INTEGER NOT NULL, last_step INTEGER NOT NULL,
    group_id TEXT NOT NULL, tries INTEGER NOT NULL, PRIMARY KEY(step, position)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS replays_by_group ON replays(group_id);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(last_step, step, position);
CREATE TABLE IF NOT EXISTS bodies(seq INTEGER PRIMARY KEY, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS policies(version INTEGER PRIMARY KEY, step INTEGER NOT NULL, digest TEXT NOT NULL,
    published_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS policies_by_step ON policies(step);
CREATE TABLE IF NOT EXISTS dead_letters(id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL, reroll INTEGER NOT NULL, attempts INTEGER NOT NULL, failure TEXT NOT NULL,
    reason TEXT NOT NULL, detail TEXT NOT NULL, buried_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS frames(id INTEGER PRIMARY KEY AUTOINCREMENT, received_at REAL NOT NULL, reason TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class JournalFullError(JournalError):
    """The disk is full. Nothing was written; the same call may succeed later."""


class JournalInUseError(JournalError):
    """Another process writes this journal."""

    exit_code = ExitCode.ENDPOINT_IN_USE


@dataclass(frozen=True)
class Entry:
    """One answered group, as it is appended."""

    group_id: str
    epoch: int
    prompt_id: int
    reroll: int
    attempt: int
    producer: str
    policy_version: int
    outcome: Outcome
    reward: float | None  # mean over the group of the weighted sum, for people; None where nothing was scored
    judgement: "Judgement"
    num_tokens: int
    frame: bytes  # the wire message, encoded

    def crc(self) -> int:
        """CRC-32 of what never changes in a row."""
        identity = (self.group_id, self.epoch, self.prompt_id, self.reroll, self.attempt, self.policy_version)
        return row_crc(*identity, self.outcome, self.frame)


def row_crc(
    group_id: str, epoch: int, prompt_id: int, reroll: int, attempt: int, version: int, outcome: str, frame: bytes
) -> int:
    identity = f"{group_id} {epoch} {prompt_id} {reroll} {attempt} {version} {outcome}"
    return crc32(frame, crc32(identity.encode()))


@dataclass(frozen=True)
class DeadLetter:
    """A prompt that was given up for one epoch."""

    epoch: int
    prompt_id: int
    reroll: int
    attempts: int
    failure: str  # the class: data or infra
    reason: str
    detail: str


class Journal:
    """See the module's guarantee.

    Args:
        path: the database file; created, with its folder, if it is not there.
        observe_commit_s: told how long every commit took.

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
            for statement in filter(str.strip, _TABLES.split(";")):
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

    # What the run is

    def facts(self) -> dict[str, str]:
        return dict(self.query("SELECT name, value FROM facts"))

    def note_facts(self, facts: dict[str, str]) -> None:
        with self.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO facts VALUES(?, ?)", facts.items())

    # Groups

    @property
    def last_seq(self) -> int:
        """The sequence number of the newest row, 0 if there was never one."""
        found = self.query("SELECT seq FROM sqlite_sequence WHERE name = 'groups'")
        return int(found[0][0]) if found else 0

    def known(self, group_ids: Iterable[str]) -> set[str]:
        """Those of `group_ids` that have a row."""
        return {g for g in group_ids if self.query("SELECT 1 FROM groups WHERE group_id = ?", (g,))}

    def append(self, entries: Iterable[Entry]) -> None:
        """Writes rows in this order."""
        now = time.time()
        with self.transaction() as db:
            for e in entries:
                db.execute(
                    "INSERT INTO groups(group_id, epoch, prompt_id, reroll, attempt, producer, policy_version, outcome,"
                    " reward, verdict, num_scored, num_successes, num_tokens, num_bytes, accepted_at, crc)"
                    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (e.group_id, e.epoch, e.prompt_id, e.reroll, e.attempt, e.producer, e.policy_version, e.outcome,
                     e.reward, *e.judgement, e.num_tokens, len(e.frame), now, e.crc()),
                )  # fmt: skip
                db.execute("INSERT INTO bodies VALUES(?, ?)", (db.last_insert_rowid(), e.frame))

    def frames(self, group_ids: Iterable[str]) -> list[bytes]:
        """The messages of these groups, in the order asked for.

        Raises:
            JournalError: one is not there, or its checksum does not fit.
        """
        return [self._frame(group_id) for group_id in group_ids]

    def _frame(self, group_id: str) -> bytes:
        found = self.query(
            "SELECT group_id, epoch, prompt_id, reroll, attempt, policy_version, outcome, frame, crc"
            " FROM groups JOIN bodies USING(seq) WHERE group_id = ?",
            (group_id,),
        )
        if not found:
            raise JournalError(f"{self.path} does not hold group {group_id}, which is still needed; was it edited?")
        *fields, crc = found[0]
        if row_crc(*fields) != crc:
            raise JournalError(f"{self.path}: group {group_id} is damaged on disk (checksum); see rl-journal verify")
        frame: bytes = fields[-1]
        return frame

    # Steps

    def claim(self, step: int, last_step: int, group_ids: Sequence[str], num_fresh: int) -> None:
        """These groups, in this order, are what optimizer steps `step` to `last_step` train; after the first `num_fresh`
        come those that stand in again. Before the first step begins."""
        fresh, again = group_ids[:num_fresh], group_ids[num_fresh:]
        with self.transaction() as db:
            db.executemany(
                "UPDATE groups SET step = ?, last_step = ?, position = ?, tries = tries + 1 WHERE group_id = ?",
                [(step, last_step, position, group_id) for position, group_id in enumerate(fresh)],
            )
            db.executemany(
                "INSERT INTO replays(step, position, last_step, group_id, tries) VALUES(?, ?, ?, ?, 1)"
                " ON CONFLICT DO UPDATE SET tries = tries + 1",
                [(step, num_fresh + index, last_step, group_id) for index, group_id in enumerate(again)],
            )

    def end_step(self, step: int) -> None:
        """The step ended."""
        with self.transaction() as db:
            db.execute("UPDATE groups SET tries = 0 WHERE last_step = ? AND tries > 0 AND dropped IS NULL", (step,))
            db.execute("UPDATE replays SET tries = 0 WHERE last_step = ?", (step,))

    def note_policy(self, version: int, step: int, digest: str) -> None:
        """The step made this policy. Before it is announced."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO policies VALUES(?, ?, ?, ?)", (version, step, digest, time.time()))

    def drop(self, group_ids: Iterable[str], reason: DropReason) -> None:
        """These groups will not be trained."""
        with self.transaction() as db:
            db.executemany("UPDATE groups SET dropped = ? WHERE group_id = ?", [(reason, g) for g in group_ids])

    @property
    def newest_version(self) -> int:
        """The newest policy that this run ever made, -1 if none."""
        return int(self.query("SELECT coalesce(max(version), -1) FROM policies")[0][0])

    # What went wrong

    def bury(self, letter: DeadLetter) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT INTO dead_letters(epoch, prompt_id, reroll, attempts, failure, reason, detail, buried_at)"
                " VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                (letter.epoch, letter.prompt_id, letter.reroll, letter.attempts, letter.failure, letter.reason,
                 letter.detail[:4096], time.time()),
            )  # fmt: skip

    def quarantine_frames(self, frames: Iterable[tuple[str, bytes]]) -> None:
        """Keeps frames that were refused, each with its reason: the newest few, and the beginning of long ones."""
        with self.transaction() as db:
            db.executemany(
                "INSERT INTO frames(received_at, reason, num_bytes, frame) VALUES(?, ?, ?, ?)",
                [(time.time(), reason[:4096], len(frame), bytes(frame[:_MAX_FRAME_BYTES])) for reason, frame in frames],
            )
            db.execute("DELETE FROM frames WHERE id <= (SELECT max(id) FROM frames) - ?", (_MAX_FRAMES,))

    # For the other modules of this package

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
                f"{self.path} is damaged ({error}); see what rl-journal verify says, or restore a copy of run_dir"
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
