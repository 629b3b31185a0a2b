"""The journal: every answered group is on the disk before its producer may forget it.

Guarantee: when a method returns, what it wrote survives a crash of the process and of the machine (SQLite, write-ahead log,
`synchronous=FULL`); when it raises, nothing of it happened. A full disk raises `JournalFullError`, and the same call may be tried
again. Any other I/O error is final, because a failed fsync leaves unknown what the disk holds: every further call is refused,
the process ends, and the next one starts from the disk. One process writes a journal (a lock file enforces it); any number may
read it (`replay.journal.reader`).
"""

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import apsw

from protocol.errors import ExitCode, JournalError
from protocol.runtime.files import sync
from replay.journal.schema import (
    FRAME,
    NEWEST_PLAN,
    SCHEMA,
    TABLES,
    DeadLetter,
    DropReason,
    JournalEntry,
    MicroBatchPlan,
    RecordedBatch,
    intact_frame,
)


class JournalFullError(JournalError):
    """The disk is full. Nothing was written; the same call may succeed later."""


class JournalInUseError(JournalError):
    """Another process writes this journal."""

    exit_code = ExitCode.ENDPOINT_IN_USE


class Journal:
    """The journal of the one process that writes it. Creates the file, with its folder, if it is not there.

    Args:
        observe_commit_s: gets the seconds that each commit took.

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
        """Return why it refuses every call, if it does."""
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
        """Commit what the block did, or nothing of it."""
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

    def known(self, lease_ids: Iterable[str]) -> set[str]:
        """Return the `lease_ids` that have a row."""
        return {g for g in lease_ids if self.query("SELECT 1 FROM groups WHERE lease_id = ?", (g,))}

    def append(self, entries: Iterable[JournalEntry]) -> None:
        """Write rows in this order."""
        now = time.time()
        with self.transaction() as db:
            for entry in entries:
                db.execute(
                    "INSERT INTO groups(lease_id, epoch, prompt_id, reroll, attempt, producer, policy_version, outcome,"
                    " reward, verdict, num_scored, num_successes, num_tokens, num_bytes, accepted_at, crc, answer)"
                    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (entry.lease_id, *entry.lease.key, entry.lease.attempt, entry.producer, entry.policy_version,
                     entry.outcome, entry.reward, *entry.grade, entry.num_tokens, len(entry.frame), now, entry.crc(),
                     entry.answer),
                )  # fmt: skip
                seq = db.last_insert_rowid()
                db.execute("INSERT INTO bodies VALUES(?, ?)", (seq, entry.frame))
                if entry.missing:
                    db.execute("INSERT INTO missing_rewards VALUES(?, ?)", (seq, entry.missing))

    def frames(self, lease_ids: Iterable[str]) -> list[bytes]:
        """The messages of these groups, in the order asked for. Raises as `intact_frame`."""
        return [intact_frame(self.path, lease_id, self.query(FRAME, (lease_id,))) for lease_id in lease_ids]

    # Prompts

    def drawn(self, epoch: int, block: int) -> int | None:
        """Return the mask that was noted for this block of an epoch's order, if one was."""
        found = self.query("SELECT mask FROM draws WHERE epoch = ? AND block = ?", (epoch, block))
        return int(found[0][0]) if found else None

    def note_draw(self, epoch: int, block: int, mask: int) -> None:
        """Note which places of a block are asked: place i where bit i is set."""
        with self.transaction() as db:
            db.execute("INSERT INTO draws(epoch, block, mask) VALUES(?, ?, ?)", (epoch, block, mask))

    # Steps

    def claim(self, batch: RecordedBatch) -> None:
        """Note, before the first step of a batch begins, that its steps train its groups in this order."""
        step, last_step, lease_ids, num_fresh, last_answer = batch
        fresh, again = lease_ids[:num_fresh], lease_ids[num_fresh:]
        with self.transaction() as db:
            db.executemany(
                "UPDATE groups SET step = ?, last_step = ?, last_answer = ?, position = ?, tries = tries + 1 WHERE lease_id = ?",
                [(step, last_step, last_answer, position, lease_id) for position, lease_id in enumerate(fresh)],
            )
            db.executemany(
                "INSERT INTO replays(step, position, last_step, lease_id, tries) VALUES(?, ?, ?, ?, 1)"
                " ON CONFLICT DO UPDATE SET tries = tries + 1",
                [(step, num_fresh + index, last_step, lease_id) for index, lease_id in enumerate(again)],
            )

    def end_step(self, step: int, plan: MicroBatchPlan | None = None) -> None:
        """Note that the step ended, and how it was split into passes."""
        with self.transaction() as db:
            if plan is not None:
                db.execute("INSERT OR REPLACE INTO plans VALUES(?, ?, ?)", plan[:3])
                if plan.advantages:
                    db.execute("INSERT OR REPLACE INTO advantages VALUES(?, ?)", (plan.step, plan.advantages))
            db.execute("UPDATE groups SET tries = 0 WHERE last_step = ? AND tries > 0 AND dropped IS NULL", (step,))
            db.execute("UPDATE replays SET tries = 0 WHERE last_step = ?", (step,))

    def newest_plan(self, step: int) -> MicroBatchPlan | None:
        """Return the plan of this step, or of the newest known step before it."""
        found = self.query(NEWEST_PLAN, (step,))
        return MicroBatchPlan(*found[0]) if found else None

    def undo_try(self, last_step: int) -> None:
        """Do not count this try of the batch that ends with step `last_step`: it was not why the trainer stops."""
        with self.transaction() as db:
            taken = "SET tries = tries - 1 WHERE last_step = ? AND tries > 0"
            db.execute(f"UPDATE groups {taken} AND dropped IS NULL", (last_step,))
            db.execute(f"UPDATE replays {taken}", (last_step,))

    def note_policy(self, version: int, step: int, digest: str) -> None:
        """Note that the step made this policy, before producers hear of it."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO policies VALUES(?, ?, ?, ?)", (version, step, digest, time.time()))

    def drop(self, lease_ids: Iterable[str], reason: DropReason) -> None:
        """Note that these groups will not be trained."""
        with self.transaction() as db:
            db.executemany("UPDATE groups SET dropped = ? WHERE lease_id = ?", [(reason, g) for g in lease_ids])

    @property
    def newest_version(self) -> int:
        """The newest policy that this run ever made, -1 if none."""
        return int(self.query("SELECT coalesce(max(version), -1) FROM policies")[0][0])

    # What went wrong

    def add_dead_letter(self, letter: DeadLetter) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT INTO dead_letters(epoch, prompt_id, reroll, attempts, failure, reason, detail, failed_at)"
                " VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                (letter.epoch, letter.prompt_id, letter.reroll, letter.attempts, letter.failure, letter.reason,
                 letter.detail[:4096], time.time()),
            )  # fmt: skip

    def quarantine_frames(self, frames: Iterable[tuple[str, bytes]]) -> None:
        """Keep frames that were refused, each with its reason: the newest few, and the beginning of long ones."""
        with self.transaction() as db:
            db.executemany(
                "INSERT INTO frames(received_at, reason, num_bytes, frame) VALUES(?, ?, ?, ?)",
                [(time.time(), reason[:4096], len(frame), bytes(frame[:_MAX_FRAME_BYTES])) for reason, frame in frames],
            )
            db.execute("DELETE FROM frames WHERE id <= (SELECT max(id) FROM frames) - ?", (_MAX_FRAMES,))

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
            self._failure = f"{self.path} cannot be written or read ({error}); check the disk, then start again"
            raise JournalError(self._failure) from error


def _lock(path: Path) -> BinaryIO:
    """Lock the journal until the file returned is closed, or the process ends."""
    stream = Path(f"{path}.lock").open("ab")  # noqa: SIM115  open as long as the journal is
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise JournalInUseError(
            f"another rl-trainer is at work in {path.parent}; stop it, or choose another run_dir"
        ) from None
    return stream


_MAX_FRAMES, _MAX_FRAME_BYTES = 256, 64 * 1024
