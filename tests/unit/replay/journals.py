"""What the tests of the journal do again and again."""

import contextlib
from pathlib import Path

import apsw

from replay.journal.schema import DeadLetter
from replay.journal.writer import Journal
from tests.unit.replay.builders import claim, entry, lease_ids

COLUMNS = (
    "seq, lease_id, epoch, prompt_id, attempt, producer, policy_version, outcome, reward, num_tokens, num_bytes,"
    " step, last_step, position, tries, dropped"
)


def rows(journal: Journal, columns: str = COLUMNS) -> list[tuple]:
    return journal.query(f"SELECT {columns} FROM groups ORDER BY seq")


def everything(journal: Journal) -> list[list[tuple]]:
    tables = ("groups", "bodies", "replays", "policies", "dead_letters", "frames", "facts")
    return [journal.query(f"SELECT * FROM {table} ORDER BY 1") for table in tables]


def alter(path: Path, sql: str, *bindings: object) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as db, db:
        db.execute(sql, bindings)


def fill(journal: Journal) -> None:
    """One of everything."""
    journal.note_facts({"run_id": "r", "num_generations": "2"})
    journal.append([entry(0), entry(1, outcome="no_signal", reward=None), entry(2, outcome="stale"), entry(3)])
    claim(journal, 1, 2, 3, 0)
    journal.end_step(1)
    journal.note_policy(1, 1, "digest of 1")
    journal.drop(lease_ids(0), "quarantined")
    journal.add_dead_letter(DeadLetter(0, 7, 1, 3, "data", "reward_failed", "boom"))
    journal.quarantine_frames([("not a frame", b"\0\1\2")])
