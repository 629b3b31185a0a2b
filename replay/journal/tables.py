"""The tables of a journal, and what their rows hold.

A group's row says what became of it:

    outcome   accepted, no_signal, or stale: the answer that the producer got
    step      first optimizer step (from 1) that trains it, set before the step begins; `last_step` the last one
    tries     times that its steps were begun without the last one ending; 2 of them quarantine the group
    dropped   why an accepted group will not be trained after all: stale, quarantined, or configuration
    verdict   what the judging reward said: failed, solved, mixed or unscored (`replay.prompts.rerolls`)

Each later use of a group that is replayed is a row of `replays`. The table `cuts` says how a step was cut into passes,
`advantages` has those of its completions, and `missing_rewards` says why rewards of a group are missing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from isal.isal_zlib import crc32

from protocol.errors import JournalError
from replay.lease_ids import LeaseId

if TYPE_CHECKING:
    from replay.prompts.rerolls import Grade  # which needs numpy; programs that read a journal do not

Outcome = Literal["accepted", "no_signal", "stale"]
DropReason = Literal["stale", "quarantined", "configuration"]

MAX_TRIES = 2
"""A group that was in the step when the trainer died so many times is quarantined."""

SCHEMA = 1
TABLES = """
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
CREATE TABLE IF NOT EXISTS missing_rewards(seq INTEGER PRIMARY KEY, missing BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS policies(version INTEGER PRIMARY KEY, step INTEGER NOT NULL, digest TEXT NOT NULL,
    published_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS policies_by_step ON policies(step);
CREATE TABLE IF NOT EXISTS dead_letters(id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL, reroll INTEGER NOT NULL, attempts INTEGER NOT NULL, failure TEXT NOT NULL,
    reason TEXT NOT NULL, detail TEXT NOT NULL, buried_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS cuts(step INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, random_state BLOB);
CREATE TABLE IF NOT EXISTS advantages(step INTEGER PRIMARY KEY, advantages BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS frames(id INTEGER PRIMARY KEY AUTOINCREMENT, received_at REAL NOT NULL, reason TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Entry:
    """One answered group, as it is appended."""

    lease: LeaseId
    producer: str
    policy_version: int
    outcome: Outcome
    reward: float | None  # mean over the group of the weighted sum, for people; None where nothing was scored
    grade: "Grade"
    num_tokens: int
    frame: bytes  # the wire message, encoded
    missing: bytes = b""  # why rewards of it are missing, encoded for people; empty: nothing is known

    @property
    def group_id(self) -> str:
        return str(self.lease)

    def crc(self) -> int:
        """CRC-32 of what never changes in a row."""
        lease = self.lease
        return row_crc(self.group_id, *lease.key, lease.attempt, self.policy_version, self.outcome, self.frame)


def row_crc(
    group_id: str, epoch: int, prompt_id: int, reroll: int, attempt: int, version: int, outcome: str, frame: bytes
) -> int:
    identity = f"{group_id} {epoch} {prompt_id} {reroll} {attempt} {version} {outcome}"
    return crc32(frame, crc32(identity.encode()))


FRAME = """SELECT group_id, epoch, prompt_id, reroll, attempt, policy_version, outcome, frame, crc
    FROM groups LEFT JOIN bodies USING(seq) WHERE group_id = ?"""


def intact_frame(journal: Path, group_id: str, found: list[Any]) -> bytes:
    """The message of a group, from the row that `FRAME` found. Raises JournalError if it is not there or does not fit the row."""
    if not found:
        raise JournalError(f"{journal} does not hold group {group_id}; `slipstream journal list` shows what it holds")
    *fields, crc = found[0]
    if fields[-1] is None:
        raise JournalError(f"{journal}: group {group_id} has no body; restore a copy of run_dir")
    if row_crc(*fields) != crc:
        raise JournalError(f"{journal}: group {group_id} is damaged (checksum); restore a copy of run_dir")
    return bytes(fields[-1])


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


class StepCut(NamedTuple):
    """How an optimizer step (from 1) was cut into passes. Another cut has the same loss and gradient, in other last bits."""

    step: int
    tokens: int  # that a pass could have
    random_state: bytes | None  # of the device when the step began; None for one that draws no numbers
    advantages: bytes = b""  # float32, of the completions in the order of the groups, for people; empty: not told


NEWEST_CUT = "SELECT step, tokens, random_state FROM cuts WHERE step <= ? ORDER BY step DESC LIMIT 1"


class RecordedBatch(NamedTuple):
    """The groups that the optimizer steps `step` to `last_step` (from 1) train, in order."""

    step: int
    last_step: int
    group_ids: list[str]
    num_fresh: int  # of them, which come first; the others are replayed
