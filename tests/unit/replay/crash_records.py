"""The plain records of the model in crash_model.py."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from replay.lease_ids import Key, LeaseId

ATTEMPTS = {"data": 2, "infra": 3}
BURST = 8
REWARDS = {  # of two completions: the outcome of a group that is not stale, and what the judge says
    (0.0, 1.0): ("accepted", "mixed"),
    (-1.0, 0.0): ("accepted", "failed"),
    (1.0, 2.0): ("accepted", "solved"),
    (0.0, 0.0): ("no_signal", "failed"),
    (1.0, 1.0): ("no_signal", "solved"),
}
GroupStats = tuple[str, int, tuple[float, float]]  # lease, version, rewards


def key_of(lease_id: str) -> Key:
    return LeaseId.parse(lease_id).key


@dataclass
class Row:
    """What the journal must say of a group."""

    lease_id: str
    version: int
    outcome: str
    verdict: str
    claim: tuple[int, int, int] | None = None  # first step, last step, position
    tries: int = 0
    dropped: str | None = None


@dataclass
class ReplayRow:
    last: int
    lease_id: str
    tries: int = 0


@dataclass
class Cut:
    first: int
    last: int
    ids: list[str]
    num_fresh: int
    last_answer: int  # that it covers

    @property
    def fresh(self) -> list[str]:
        return self.ids[: self.num_fresh]

    @property
    def again(self) -> list[str]:
        return self.ids[self.num_fresh :]


@dataclass
class Prompts:
    """Where the prompts are, and their returns. Leased ones, and those that go out again, are open."""

    cursor: int = 0  # prompts that had their first attempt, or were in cooldown
    epoch: int = 0
    open: set[Key] = field(default_factory=set)
    held: set[Key] = field(default_factory=set)
    settled: set[Key] = field(default_factory=set)
    failures: Counter[tuple[Key, str]] = field(default_factory=Counter)
    deferred: dict[Key, int] = field(default_factory=dict)  # return version
    returned: dict[Key, int] = field(default_factory=dict)
    answered: set[Key] = field(default_factory=set)  # before a crash undid their deferral
    let_go: set[Key] = field(
        default_factory=set
    )  # returns that are not to be: too many wait, or the prompt's turn came
    cooldowns: dict[int, int] = field(default_factory=dict)
    passed_over: set[Key] = field(default_factory=set)  # first attempts that were not made, because of a cooldown


@dataclass
class Checkpoint:
    step: int
    state: dict[str, Any] | None
    prompts: Prompts
    num_rows: int = 0
    table: dict[str, int] = field(default_factory=dict)
    num_trained: int = 0
    last_answer: int = 0
