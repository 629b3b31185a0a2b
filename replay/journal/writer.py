"""The journal: every answered group is on the disk before its producer may forget it.

Guarantee: what a method wrote is on the disk when it returns, and nothing of it when it raises (`replay.journal.database`). One
process writes a journal (a lock file says so); any number may read it (`replay.journal.reader`).
"""

import time
from collections.abc import Iterable, Sequence

from replay.journal.database import Database
from replay.journal.tables import FRAME, NEWEST_CUT, DeadLetter, DropReason, Entry, StepCut, intact_frame

_MAX_FRAMES, _MAX_FRAME_BYTES = 256, 64 * 1024


class Journal(Database):
    """See the module's guarantee."""

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
            for entry in entries:
                db.execute(
                    "INSERT INTO groups(group_id, epoch, prompt_id, reroll, attempt, producer, policy_version, outcome,"
                    " reward, verdict, num_scored, num_successes, num_tokens, num_bytes, accepted_at, crc)"
                    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (entry.group_id, *entry.lease.key, entry.lease.attempt, entry.producer, entry.policy_version,
                     entry.outcome, entry.reward, *entry.grade, entry.num_tokens, len(entry.frame), now, entry.crc()),
                )  # fmt: skip
                seq = db.last_insert_rowid()
                db.execute("INSERT INTO bodies VALUES(?, ?)", (seq, entry.frame))
                if entry.missing:
                    db.execute("INSERT INTO missing_rewards VALUES(?, ?)", (seq, entry.missing))

    def frames(self, group_ids: Iterable[str]) -> list[bytes]:
        """The messages of these groups, in the order asked for. Raises as `intact_frame`."""
        return [intact_frame(self.path, group_id, self.query(FRAME, (group_id,))) for group_id in group_ids]

    # Steps

    def claim(self, step: int, last_step: int, group_ids: Sequence[str], num_fresh: int) -> None:
        """These groups, in this order, are what optimizer steps `step` to `last_step` train; after the first `num_fresh`
        come those that are replayed. The journal is told before the first step begins."""
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

    def end_step(self, step: int, cut: StepCut | None = None) -> None:
        """The step ended, which was cut into passes like this."""
        with self.transaction() as db:
            if cut is not None:
                db.execute("INSERT OR REPLACE INTO cuts VALUES(?, ?, ?)", cut[:3])
                if cut.advantages:
                    db.execute("INSERT OR REPLACE INTO advantages VALUES(?, ?)", (cut.step, cut.advantages))
            db.execute("UPDATE groups SET tries = 0 WHERE last_step = ? AND tries > 0 AND dropped IS NULL", (step,))
            db.execute("UPDATE replays SET tries = 0 WHERE last_step = ?", (step,))

    def newest_cut(self, step: int) -> StepCut | None:
        """Of this step, or of the newest one before it that is known."""
        found = self.query(NEWEST_CUT, (step,))
        return StepCut(*found[0]) if found else None

    def undo_try(self, last_step: int) -> None:
        """Do not count this try of the batch that ends with step `last_step`: it was not why the trainer stops."""
        with self.transaction() as db:
            taken = "SET tries = tries - 1 WHERE last_step = ? AND tries > 0"
            db.execute(f"UPDATE groups {taken} AND dropped IS NULL", (last_step,))
            db.execute(f"UPDATE replays {taken}", (last_step,))

    def note_policy(self, version: int, step: int, digest: str) -> None:
        """The step made this policy. The journal is told before producers are."""
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
