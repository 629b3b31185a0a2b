"""The journal for all readers: read-only, beside a live trainer or after one that was killed.

Guarantee: reading never changes the journal and never holds its writer up. Rows come in short statements of at most 1000,
so that any journal is listed in bounded memory and an unfinished iteration keeps no transaction open. Every body is
checked against its row before it is handed out.
"""

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import apsw

from protocol.errors import JournalError
from replay.journal.schema import (
    EVERY_GROUP,
    FRAME,
    NEWEST_PLAN,
    SCHEMA,
    DeadLetterRow,
    GroupFilter,
    GroupRow,
    MicroBatchPlan,
    PolicyRow,
    RecordedBatch,
    RefusedFrame,
    Use,
    intact_frame,
)

Row = TypeVar("Row", PolicyRow, GroupRow, DeadLetterRow, RefusedFrame)
_PAGE_ROWS = 1000
_WHAT_IT_IS = "a journal is RUN_DIR/journal.sqlite, written by rl-trainer"
_STATE = """CASE
    WHEN dropped = 'quarantined' THEN 'quarantined' WHEN outcome = 'stale' OR dropped = 'stale' THEN 'stale'
    WHEN dropped IS NOT NULL THEN 'dropped' WHEN outcome = 'no_signal' THEN 'no_signal'
    WHEN last_step IS NULL THEN 'ready' WHEN tries > 0 THEN 'claimed' ELSE 'trained' END"""
_NUM_REPLAYS = "(SELECT count(*) FROM replays WHERE replays.lease_id = groups.lease_id)"
_COMPUTED = {
    "num_replays": _NUM_REPLAYS,
    "state": _STATE,
    "head": "substr(frame, 1, 64)",
}
_WANTED = f"""(:least_version IS NULL OR policy_version BETWEEN :least_version AND :most_version)
    AND (:least_step IS NULL OR step <= :most_step AND last_step >= :least_step)
    AND (:state IS NULL OR {_STATE} = :state) AND (:verdict IS NULL OR verdict = :verdict)
    AND (:least_reward IS NULL OR reward BETWEEN :least_reward AND :most_reward)
    AND (:prompt_id IS NULL OR prompt_id = :prompt_id)
    AND (:least_replays IS NULL OR {_NUM_REPLAYS} BETWEEN :least_replays AND :most_replays)"""
# A batch that was quarantined after some of its iterations were in a checkpoint stays trained as far as that, with its
# last step moved back. Any other quarantined group was never part of the run that survived.
_RECORDED = """outcome = 'accepted' AND last_step IS NOT NULL
    AND (dropped IS NULL OR dropped = 'quarantined' AND last_step - step + 1 < :num_iterations)"""


class JournalReader:
    """Reads a journal. Use it with `contextlib.closing`. Raises JournalError if `path` is no journal that this
    release can read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise JournalError(f"{path}: no such file; {_WHAT_IT_IS}")
        # In a folder that we may not write the reader's side files find no place. Without a writer it needs none.
        alone = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
        uri = f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if alone else "")
        with self._errors():
            self._db = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
            self._db.set_busy_timeout(10_000)
        try:
            if not self._query("SELECT 1 FROM sqlite_master WHERE name = 'groups'"):
                raise JournalError(f"{path} is not a journal; {_WHAT_IT_IS}")
            ((schema,),) = self._query("PRAGMA user_version")
            if schema != SCHEMA:
                raise JournalError(f"{path} has journal schema {schema}, this release reads {SCHEMA}; use its release")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def copy_to(self, path: Path) -> None:
        """Copy the journal as it is at one moment into a new file, or raises JournalError."""
        try:
            with contextlib.closing(apsw.Connection(str(path))) as copy, copy.backup("main", self._db, "main") as pages:
                pages.step()
        except apsw.Error as error:
            why = "the disk is full" if isinstance(error, apsw.FullError) else error  # it says "not an error"
            raise JournalError(f"{path}: the journal cannot be copied there ({why}); choose another place") from error

    # What the run is

    def facts(self) -> dict[str, str]:
        return dict(self._query("SELECT name, value FROM facts ORDER BY name"))

    def policies(self) -> Iterator[PolicyRow]:
        return self._pages(PolicyRow, "policies")

    def policy_at(self, step: int) -> PolicyRow | None:
        """Return the newest policy after `step` optimizer steps; None if the journal knows none."""
        newest = "WHERE step <= ? ORDER BY step DESC, version DESC LIMIT 1"
        found = self._query(f"SELECT {_columns(PolicyRow)} FROM policies {newest}", (step,))
        return PolicyRow(*found[0]) if found else None

    # Groups

    def rows(self, wanted: GroupFilter = EVERY_GROUP, newest: int = 0) -> Iterator[GroupRow]:
        """Yield the present groups in order of arrival: the `newest` of them, or (0) all."""
        newest_first = f"SELECT seq FROM groups WHERE {_WANTED} ORDER BY seq DESC LIMIT :newest"
        bindings = wanted.bindings() | {"newest": newest or -1}
        ((first, last),) = self._query(f"SELECT min(seq), max(seq) FROM ({newest_first})", bindings)
        bounds = {"first_seq": first, "last_seq": last}
        where = f"seq BETWEEN :first_seq AND :last_seq AND {_WANTED}"
        return self._pages(GroupRow, "groups", where, wanted.bindings() | bounds)

    def count(self, wanted: GroupFilter = EVERY_GROUP) -> int:
        return int(self._query(f"SELECT count(*) FROM groups WHERE {_WANTED}", wanted.bindings())[0][0])

    def row(self, lease_id: str) -> GroupRow | None:
        found = self._query(f"SELECT {_columns(GroupRow)} FROM groups WHERE lease_id = ?", (lease_id,))
        return GroupRow(*found[0]) if found else None

    def rows_between(self, first_seq: int, last_seq: int) -> Iterator[GroupRow]:
        """The groups with these sequence numbers, both included, in order of arrival."""
        return self._pages(GroupRow, "groups", "seq <= :last", {"last": last_seq}, first_seq - 1)

    def rows_of(self, seqs: Iterable[int]) -> list[GroupRow]:
        """The groups with these sequence numbers that are still there, in the order asked for."""
        sql = f"SELECT {_columns(GroupRow)} FROM groups WHERE seq = ?"
        return [GroupRow(*found[0]) for seq in seqs if (found := self._query(sql, (seq,)))]

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest sequence number that is there; 0 and 0 if there is no group."""
        # Two statements: SQLite answers one that asks for both by reading all of the table.
        found = [self._query(f"SELECT {bound}(seq) FROM groups")[0][0] for bound in ("min", "max")]
        return found[0] or 0, found[1] or 0

    def seqs(self, *, before: int | None = None, after: int | None = None, limit: int) -> list[int]:
        """The newest sequence numbers before one, newest first; or, with `after`, those that follow it, oldest first."""
        if after is not None:
            sql, bindings = "SELECT seq FROM groups WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)
        else:
            sql, bindings = "SELECT seq FROM groups WHERE seq < ? ORDER BY seq DESC LIMIT ?", (before or 2**62, limit)
        return [seq for (seq,) in self._query(sql, bindings)]

    def body(self, row: GroupRow) -> bytes | None:
        """The message of a group; None if the trainer has deleted the group since its row was read. Raises as `intact_frame`."""
        found = self._query(FRAME, (row.lease_id,))
        return intact_frame(self.path, row.lease_id, found) if found else None

    def missing_rewards(self, row: GroupRow) -> bytes:
        """Return why rewards of a group are missing, encoded; empty if none are."""
        found = self._query("SELECT missing FROM missing_rewards WHERE seq = ?", (row.seq,))
        return bytes(found[0][0]) if found else b""

    def frames(self, lease_ids: Iterable[str]) -> list[bytes]:
        """The messages of these groups, in the order asked for. Raises as `intact_frame`."""
        return [intact_frame(self.path, lease_id, self._query(FRAME, (lease_id,))) for lease_id in lease_ids]

    def batches(self, from_step: int = 1) -> Iterator[RecordedBatch]:
        """The batches that train optimizer step `from_step` and all later ones, in the order in which they were trained.
        Steps that a restart selected anew come once, with their last batch. The newest may be of a step that has not ended."""
        num_iterations = int(self.facts().get("num_iterations", 1))
        while rows := self._query(
            f"SELECT step, last_step, lease_id FROM groups WHERE {_RECORDED} AND last_step ="
            f" (SELECT min(last_step) FROM groups WHERE last_step >= :from_step AND {_RECORDED}) ORDER BY position",
            {"from_step": from_step, "num_iterations": num_iterations},
        ):
            step, last_step, _ = rows[0]
            fresh = [lease_id for _, _, lease_id in rows]
            again = self._query("SELECT lease_id FROM replays WHERE step = ? ORDER BY position", (step,))
            yield RecordedBatch(step, last_step, fresh + [lease_id for (lease_id,) in again], len(fresh))
            from_step = last_step + 1

    def uses(self, *, of_group: str | None = None, of_step: int | None = None) -> Iterator[Use]:
        """Groups that were replayed, in the order of training: all, those of one group, or those of the batch that begins
        with one step."""
        sql = (
            "SELECT step, position, last_step, lease_id, tries FROM replays"
            " WHERE (:group IS NULL OR lease_id = :group) AND (:only IS NULL OR step = :only)"
            f" AND (step, position) > (:step, :position) ORDER BY step, position LIMIT {_PAGE_ROWS}"
        )
        wanted = {"group": of_group, "only": of_step}
        last = (-1, -1)
        while page := self._query(sql, wanted | {"step": last[0], "position": last[1]}):
            yield from (Use(*row) for row in page)
            last = page[-1][:2]

    def newest_plan(self, step: int) -> MicroBatchPlan | None:
        """Return what `Journal.newest_plan` returns."""
        found = self._query(NEWEST_PLAN, (step,))
        return MicroBatchPlan(*found[0]) if found else None

    def advantages(self, batch: RecordedBatch, step: int) -> dict[str, tuple[float, ...]]:
        """Return the advantages of each group's completions in one step of this batch; empty if they are not known."""
        num_completions = int(self.facts().get("num_generations", 0))
        found = self._query("SELECT advantages FROM advantages WHERE step = ?", (step,))
        if not found or len(found[0][0]) != 4 * num_completions * len(batch.lease_ids):
            return {}
        return dict(zip(batch.lease_ids, struct.iter_unpack(f"<{num_completions}f", found[0][0]), strict=True))

    def num_deleted(self) -> int:
        """Groups that retention has deleted, of all there ever were."""
        ever = "SELECT seq FROM sqlite_sequence WHERE name = 'groups'"
        return int(self._query(f"SELECT coalesce(({ever}), 0) - count(*) FROM groups")[0][0])

    def dead_letters(self) -> Iterator[DeadLetterRow]:
        return self._pages(DeadLetterRow, "dead_letters")

    def refused_frames(self) -> Iterator[RefusedFrame]:
        return self._pages(RefusedFrame, "frames")

    def database_problems(self) -> list[str]:
        """Return the problems that SQLite finds in the file, and bodies that belong to no group."""
        problems = [text for (text,) in self._query("PRAGMA integrity_check") if text != "ok"]
        orphans = self._query("SELECT seq FROM bodies WHERE seq NOT IN (SELECT seq FROM groups)")
        return problems + [f"body {seq} belongs to no group" for (seq,) in orphans]

    def _query(self, sql: str, bindings: tuple[Any, ...] | dict[str, Any] = ()) -> list[Any]:
        with self._errors():
            return self._db.execute(sql, bindings).fetchall()

    def _pages(
        self, kind: type[Row], table: str, where: str = "TRUE", bindings: dict[str, Any] | None = None, after: int = -1
    ) -> Iterator[Row]:
        """Yield the rows behind the rowid `after`, in the order of the rowid."""
        columns = f"rowid, {_columns(kind)}"
        sql = f"SELECT {columns} FROM {table} WHERE rowid > :after AND {where} ORDER BY rowid LIMIT {_PAGE_ROWS}"
        while page := self._query(sql, (bindings or {}) | {"after": after}):
            yield from (kind(*values) for _, *values in page)
            after = page[-1][0]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except apsw.NotADBError as error:
            raise JournalError(f"{self.path} is not a journal; {_WHAT_IT_IS}") from error
        except (apsw.CorruptError, UnicodeDecodeError) as error:
            raise JournalError(f"{self.path} is damaged ({error}); restore a copy of run_dir") from error
        except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
            copy = f"copy it, and {self.path.name}-wal if there is one, to a folder of your own"
            raise JournalError(f"{self.path} cannot be opened ({error}); {copy}") from error
        except apsw.Error as error:
            raise JournalError(f"{self.path} cannot be read ({error}); check the disk, then try again") from error


def _columns(kind: type[Row]) -> str:
    """Return the columns that make a row."""
    return ", ".join(_COMPUTED.get(field.name, field.name) for field in fields(kind))
