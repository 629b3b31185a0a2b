"""What a journal says of its groups, policies and failures, as values.

A group is in exactly one state:

    ready         accepted, in no step yet
    claimed       in a step that has not ended; or did not, when its trainer died
    trained       its step ended
    no_signal     all rewards are equal: settled on arrival
    stale         too old, on arrival or when the batch was cut
    quarantined   the trainer died too often in its step
    dropped       it no longer fits the configuration
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from replay.journal.tables import DeadLetter

State = Literal["ready", "claimed", "trained", "no_signal", "stale", "quarantined", "dropped"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class GroupRow:
    """What the journal knows of one group, beside its body. The columns are those of `replay.journal.tables`."""

    seq: int
    group_id: str
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
    buried_at: float


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
    group_id: str
    tries: int


@dataclass(frozen=True)
class GroupFilter:
    """Which groups are meant. Bounds are inclusive; what is None does not matter."""

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
