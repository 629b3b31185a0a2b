"""What is known of a run that was killed again and again, in the words of its checker.

Guarantee: plain records. The surviving lineage is what the last checkpoints kept: a trainer process that starts at
checkpoint C undoes every later step of the processes before it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[int, int, int]
"""Epoch, prompt, and how often the prompt had come back in that epoch."""


class Answer(NamedTuple):
    """An acknowledgement or a refusal that reached a producer."""

    producer: str
    lease_id: str
    outcome: str
    digest: str | None  # of the group that it held; None if it held none any more


class Batch(NamedTuple):
    """What was handed to training: the groups (id and digest) of the steps `step` to `last_step`, from 1."""

    step: int
    last_step: int
    groups: tuple[tuple[str, str], ...]
    num_fresh: int  # of them, which come first; the others are replayed


class Replay(NamedTuple):
    """That a group is replayed, as the journal shows it when the run is over."""

    step: int
    last_step: int
    position: int
    lease_id: str


@dataclass(frozen=True)
class Incarnation:
    """One trainer process that got as far as training."""

    start_step: int
    batches: tuple[Batch, ...]
    steps_ended: frozenset[int]


@dataclass(frozen=True)
class Row:
    """A group as the journal shows it when the run is over."""

    seq: int
    lease_id: str
    epoch: int
    prompt_id: int
    reroll: int
    policy_version: int
    outcome: str
    step: int | None
    last_step: int | None
    dropped: str | None
    digest: str
    rewards: tuple[float, ...]

    @property
    def key(self) -> Key:
        return (self.epoch, self.prompt_id, self.reroll)

    @property
    def has_signal(self) -> bool:
        return min(self.rewards) != max(self.rewards)

    @property
    def has_failed(self) -> bool:
        return max(self.rewards) <= 0.0

    @property
    def is_solved(self) -> bool:
        return min(self.rewards) >= 1.0


@dataclass(frozen=True)
class Rules:
    """What the configuration allows. The defaults: every group once, and no prompt returns or is in cooldown."""

    max_staleness: int
    sync_interval: int  # optimizer steps per policy version
    max_times_sampled: int = 1  # the first training included
    max_age_versions: int = 0  # of a replayed group
    max_rerolls: int = 0  # of a prompt in an epoch
    delay_versions: int = 0  # by which the policy of a reroll is newer than the one that failed
    cooldown_epochs: int = 0  # that a solved prompt may sit out


@dataclass(frozen=True)
class Evidence:
    answers: Sequence[Answer]
    incarnations: Sequence[Incarnation]
    rows: Mapping[str, Row]  # also of groups that retention has deleted since
    replays: frozenset[Replay]  # also of groups that retention has deleted since
    dead: frozenset[Key]  # prompts that were given up
    final_step: int
    rules: Rules
    num_prompts: int
    epoch: int  # of the ledger in the last checkpoint; all prompts of earlier ones were given out
    unsettled: frozenset[Key]  # of that checkpoint
    deferred: frozenset[Key]  # of that checkpoint: they wait to come back
    checkpoint_seq: int  # the newest row that it knows


class Problem(NamedTuple):
    kind: str
    text: str


@dataclass
class Verdict:
    problems: list[Problem] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)  # of the accepted groups
    num_replays: int = 0  # uses of groups after their first training, in the surviving lineage
    rerolls: int = 0  # attempts at prompts that returned, and were answered

    def add(self, kind: str, text: str) -> None:
        self.problems.append(Problem(kind, text))

    def count(self, kind: str) -> int:
        return sum(problem.kind == kind for problem in self.problems)


def lineage(incarnations: Sequence[Incarnation]) -> dict[int, Batch]:
    """The batch of every step that survived."""
    survived: dict[int, Batch] = {}
    for incarnation in incarnations:
        survived = {step: batch for step, batch in survived.items() if step <= incarnation.start_step}
        for batch in incarnation.batches:
            steps = range(max(batch.step, incarnation.start_step + 1), batch.last_step + 1)
            survived |= {step: batch for step in steps if step in incarnation.steps_ended}
    return survived


def key_of(lease_id: str) -> Key:
    epoch, prompt_id, reroll, *_ = lease_id.split("-")
    return (int(epoch), int(prompt_id), int(reroll))
