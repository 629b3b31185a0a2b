"""The tables of a journal, and what their rows say of groups, policies and failures, as values.

A group's row says what became of it:

    outcome   accepted, no_signal, or stale: the answer that the producer got
    step      first optimizer step (from 1) that trains it, set before the step begins; `last_step` the last one
    tries     times that its steps were begun without the last one ending; 2 of them quarantine the group
    answer    its number among the run's answers, those with outcome accepted or no_signal, from 1
    last_answer  the number of the last answer that its batch covers
    dropped   why an accepted group will not be trained after all: stale, quarantined, or configuration
    verdict   what the judging reward said: failed, solved, mixed or unscored (`replay.rerolls`)

Each later use of a group that is replayed is a row of `replays`. The table `plans` says how a step was split into passes,
`advantages` has those of its completions, and `missing_rewards` says why rewards of a group are missing. A row of `draws` says
which places of a block of an epoch's order are asked (`replay.prompt_draws`): bit i is place i.

A group is in exactly one state:

    ready         accepted, in no step yet
    claimed       in a step that has not ended; or did not, when its trainer died
    trained       its step ended
    no_signal     all rewards are equal: done on arrival
    stale         too old, on arrival or when its batch was selected
    quarantined   the trainer died too often in its step
    dropped       it no longer fits the configuration
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from isal.isal_zlib import crc32

from protocol.errors import JournalError
from replay.lease_ids import LeaseId

if TYPE_CHECKING:
    from replay.rerolls import Grade  # which needs numpy; programs that read a journal do not
from typing import get_args

Outcome = Literal["accepted", "no_signal", "stale"]
DropReason = Literal["stale", "quarantined", "configuration"]

MAX_TRIES = 2
"""The number of times that the trainer may die in a group's step before the group is quarantined."""

SCHEMA = 2
TABLES = """
CREATE TABLE IF NOT EXISTS groups(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, lease_id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL, reroll INTEGER NOT NULL, attempt INTEGER NOT NULL, producer TEXT NOT NULL,
    policy_version INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL,
    verdict TEXT NOT NULL, num_scored INTEGER NOT NULL, num_successes INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, num_bytes INTEGER NOT NULL, accepted_at REAL NOT NULL, crc INTEGER NOT NULL,
    step INTEGER, last_step INTEGER, position INTEGER, tries INTEGER NOT NULL DEFAULT 0, dropped TEXT,
    replayable INTEGER NOT NULL DEFAULT 1, answer INTEGER, last_answer INTEGER
);
CREATE TABLE IF NOT EXISTS replays(step INTEGER NOT NULL, position INTEGER NOT NULL, last_step INTEGER NOT NULL,
    lease_id TEXT NOT NULL, tries INTEGER NOT NULL, PRIMARY KEY(step, position)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS replays_by_group ON replays(lease_id);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(last_step, step, position);
CREATE TABLE IF NOT EXISTS bodies(seq INTEGER PRIMARY KEY, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS missing_rewards(seq INTEGER PRIMARY KEY, missing BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS policies(version INTEGER PRIMARY KEY, step INTEGER NOT NULL, digest TEXT NOT NULL,
    published_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS policies_by_step ON policies(step);
CREATE TABLE IF NOT EXISTS dead_letters(id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL, reroll INTEGER NOT NULL, attempts INTEGER NOT NULL, failure TEXT NOT NULL,
    reason TEXT NOT NULL, detail TEXT NOT NULL, failed_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS plans(step INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, random_state BLOB);
CREATE TABLE IF NOT EXISTS advantages(step INTEGER PRIMARY KEY, advantages BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS frames(id INTEGER PRIMARY KEY AUTOINCREMENT, received_at REAL NOT NULL, reason TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS draws(id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, block INTEGER NOT NULL,
    mask INTEGER NOT NULL, UNIQUE(epoch, block));
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True)
class JournalEntry:
    """The row of one answered group, as it is appended."""

    lease: LeaseId
    producer: str
    policy_version: int
    outcome: Outcome
    reward: float | None  # mean over the group of the weighted sum, for people; None where nothing was scored
    grade: "Grade"
    num_tokens: int
    frame: bytes  # the wire message, encoded
    missing: bytes = b""  # why rewards of it are missing, encoded for people; empty: nothing is known
    answer: int | None = None  # its number among the run's answers; None: stale

    @property
    def lease_id(self) -> str:
        return str(self.lease)

    def crc(self) -> int:
        """CRC-32 of what never changes in a row."""
        lease = self.lease
        return row_crc(self.lease_id, *lease.key, lease.attempt, self.policy_version, self.outcome, self.frame)


def row_crc(
    lease_id: str, epoch: int, prompt_id: int, reroll: int, attempt: int, version: int, outcome: str, frame: bytes
) -> int:
    identity = f"{lease_id} {epoch} {prompt_id} {reroll} {attempt} {version} {outcome}"
    return crc32(frame, crc32(identity.encode()))


FRAME = """SELECT lease_id, epoch, prompt_id, reroll, attempt, policy_version, outcome, frame, crc
    FROM groups LEFT JOIN bodies USING(seq) WHERE lease_id = ?"""


def intact_frame(journal: Path, lease_id: str, found: list[Any]) -> bytes:
    """The message of a group, from the row that `FRAME` found. Raises JournalError if it is not there or does not fit the row."""
    if not found:
        raise JournalError(f"{journal} does not hold group {lease_id}; `slipstream journal list` shows what it holds")
    *fields, crc = found[0]
    if fields[-1] is None:
        raise JournalError(f"{journal}: group {lease_id} has no body; restore a copy of run_dir")
    if row_crc(*fields) != crc:
        raise JournalError(f"{journal}: group {lease_id} is damaged (checksum); restore a copy of run_dir")
    return bytes(fields[-1])


@dataclass(frozen=True)
class DeadLetter:
    """A prompt that gets no more leases in one epoch."""

    epoch: int
    prompt_id: int
    reroll: int
    attempts: int
    failure: str  # the class: data or infra
    reason: str
    detail: str


class MicroBatchPlan(NamedTuple):
    """The split of an optimizer step (from 1) into passes. Another plan has the same loss and gradient, in other last bits."""

    step: int
    tokens: int  # that a pass could have
    random_state: bytes | None  # of the device when the step began; None for one that draws no numbers
    advantages: bytes = b""  # float32, of the completions in the order of the groups, for people; empty: not told


NEWEST_PLAN = "SELECT step, tokens, random_state FROM plans WHERE step <= ? ORDER BY step DESC LIMIT 1"


class RecordedBatch(NamedTuple):
    """The groups that the optimizer steps `step` to `last_step` (from 1) train, in order."""

    step: int
    last_step: int
    lease_ids: list[str]
    num_fresh: int  # of them, which come first; the others are replayed
    last_answer: int = 0  # number of the last answer that it covers; not read where batches are shown


State = Literal["ready", "claimed", "trained", "no_signal", "stale", "quarantined", "dropped"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class GroupRow:
    """The row of one group, without its body. The columns are those of `replay.journal.schema`."""

    seq: int
    lease_id: str
    epoch: int
    prompt_id: int
    reroll: int
    attempt: int
    producer: str
    policy_version: int
    outcome: str
    reward: float | None
    verdict: str
    num_scored: int
    num_successes: int
    num_tokens: int
    num_bytes: int
    accepted_at: float
    crc: int
    step: int | None
    last_step: int | None
    position: int | None
    tries: int
    dropped: str | None
    num_replays: int  # times that it was replayed
    state: State


@dataclass(frozen=True)
class PolicyRow:
    version: int
    step: int  # that made it
    digest: str
    published_at: float


@dataclass(frozen=True)
class DeadLetterRow(DeadLetter):
    failed_at: float


@dataclass(frozen=True)
class RefusedFrame:
    received_at: float
    reason: str
    num_bytes: int
    head: bytes  # its first bytes


class Use(NamedTuple):
    """A group was replayed."""

    step: int
    position: int
    last_step: int
    lease_id: str
    tries: int


@dataclass(frozen=True)
class GroupFilter:
    """A filter of groups. Bounds are inclusive; a field that is None matches everything."""

    versions: tuple[int, int] | None = None
    steps: tuple[int, int] | None = None
    state: State | None = None
    rewards: tuple[float, float] | None = None
    prompt_id: int | None = None
    verdict: str | None = None
    replays: tuple[int, int] | None = None

    def bindings(self) -> dict[str, Any]:
        result: dict[str, Any] = {"state": self.state, "prompt_id": self.prompt_id, "verdict": self.verdict}
        bounded = {"version": self.versions, "step": self.steps, "reward": self.rewards, "replays": self.replays}
        for name, bounds in bounded.items():
            result[f"least_{name}"], result[f"most_{name}"] = bounds or (None, None)
        return result


EVERY_GROUP = GroupFilter()
