"""Selection of batches: which groups the next optimizer steps train.

Guarantee: a batch is cut by its rule (`replay.batch_rule`), or earlier where replayed groups make it full. It begins with groups
that are trained for the first time, at least one, in the order in which they came and none too stale; replayed groups follow,
within their share, age and uses. The journal knows a batch before the caller gets it. Batches that a crash undid are selected
again unchanged. Not thread-safe: the rollout buffer holds its lock.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.batch_rule import BatchRule
from replay.curriculum import CurriculumState
from replay.groups import RolloutGroup
from replay.journal.recovery import Recovery
from replay.journal.schema import Outcome, RecordedBatch
from replay.journal.writer import Journal
from replay.replay_table import ReplayCredit, ReplayTable
from replay.rerolls import Grade
from replay.sources import Sources
from replay.staleness import StalenessBudget


class OfferedGroup(NamedTuple):
    """A group, with the frame that goes into the journal."""

    group: RolloutGroup
    frame: bytes
    producer: str
    missing: bytes = b""  # why rewards of it are missing, encoded; empty: nothing is known
    of_this_run: bool = True  # False: the producer came from another run, so that only a lease of this process is meant


@dataclass(frozen=True, eq=False)
class GroupStats:
    """The numbers of an arrived group for the report of a step: a few bytes for each of its n completions, however long they
    are, because many arrive between two batches."""

    outcome: Outcome
    rewards: NDArray[np.float32]  # (n, F), NaN where a function gave none
    lengths: NDArray[np.int32]  # (n,), in tokens that the policy sampled
    truncated: NDArray[np.bool_]  # (n,)
    lease_id: str
    generation_s: float
    grade: Grade | None = None  # None: nothing judged it
    metrics: Mapping[str, float] = field(default_factory=dict)  # that reward functions logged

    @classmethod
    def of(cls, group: RolloutGroup, outcome: Outcome = "accepted", grade: Grade | None = None) -> "GroupStats":
        return cls(
            outcome,
            group.rewards,
            group.sampled_lengths,
            group.was_truncated,
            group.lease_id,
            group.generation_s,
            grade,
            group.metrics,
        )


Load = Callable[[Sequence[str]], list[RolloutGroup]]
Answers = Sequence[NDArray[np.int32] | None]
"""The token ids of the reference answer to each group's prompt, None where its row has none; empty: no run learns from them."""


LOSS_PARTS = ("rewards", "teacher", "answer")
LossWeights = Sequence[tuple[float, ...]]
"""The weights of LOSS_PARTS for each group, in their order; empty: all are 1."""


class TrainingBatch(NamedTuple):
    """The groups of the next optimizer steps, and the numbers of all groups that arrived since the last batch."""

    first_step: int  # over the batch, counted from 1; the policy before it selected the batch
    num_iterations: int  # optimizer steps to take over it from now on
    last_step: int  # of them
    groups: list[RolloutGroup]
    num_fresh: int  # of the groups, which come first; the others are replayed
    arrivals: Sequence[GroupStats] = ()
    answers: Answers = ()
    weights: LossWeights = ()
    curriculum: CurriculumState | None = None  # when the batch was cut, as are those below
    prompt_weights: Mapping[str, float] = MappingProxyType(
        {}
    )  # of dataset.sampling=by_signal, by their names in a step


def count_batch(totals: Counter[str], batch: TrainingBatch, sources: Sources) -> None:
    """Add the groups of a batch to the totals of what was trained and replayed."""
    prompt_ids = [group.lease.key.prompt_id for group in batch.groups]
    totals["trained"] += batch.num_fresh
    totals["replayed"] += len(batch.groups) - batch.num_fresh
    sources.count(totals, "trained", prompt_ids[: batch.num_fresh])
    sources.count(totals, "replayed", prompt_ids[batch.num_fresh :])


@dataclass(eq=False)
class BatchSelector:
    """Selects the groups of each batch, and keeps the groups that wait."""

    budget: StalenessBudget  # of what is trained for the first time
    journal: Journal
    rule: BatchRule
    signal: Callable[[RolloutGroup], float]  # how much a group can move the policy, its score in the replay table
    replay: ReplayTable | None = None
    max_replayed: int = 0  # groups of a batch, less than all
    next_step: int = 0
    last_answer: int = 0  # that the batches so far cover, counted over the run
    _fresh: dict[str, tuple[int, RolloutGroup]] = field(default_factory=dict)  # with their numbers as answers, in order
    _recorded: deque[RecordedBatch] = field(
        default_factory=deque
    )  # selected before a crash, to be trained again unchanged
    _resumed_at: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_replayed < self.budget.groups_per_step:
            raise ValueError("a batch needs at least one group that is trained for the first time")
        rate = 1.0 if self.replay is None else self.replay.settings.samples_per_insert
        self._credit = ReplayCredit(self.budget.groups_per_step, rate, self.max_replayed)
        self._load: Load

    @property
    def num_ready(self) -> int:
        """Count the groups that wait to be trained for the first time."""
        return len(self._fresh) + sum(batch.num_fresh for batch in self._recorded)

    def num_taken(self, num_answers: int) -> int:
        """Count the places of the coming batches that are taken, so that no more leases are given than these can train."""
        recorded = sum(batch.num_fresh if self.rule.waits_for_all else self.rule.size for batch in self._recorded)
        return recorded + self.rule.num_taken(self._signals(), num_answers - self.last_answer)

    @property
    def least_fresh(self) -> int:
        """The least number of leased groups that a batch covers; the others are replayed."""
        return self._credit.least_fresh if self.rule.waits_for_all else self.rule.size

    def _signals(self) -> list[int]:
        return [number - self.last_answer for number, _ in self._fresh.values()]

    @property
    def num_replayable(self) -> int:
        return 0 if self.replay is None else len(self.replay)

    def insert(self, group: RolloutGroup, number: int) -> None:
        """Take a group with signal, the run's answer of this number; numbers rise."""
        self._fresh[group.lease_id] = number, group

    def remove_stale(self) -> list[RolloutGroup]:
        """Drop the groups that are too old by now, and return them."""
        oldest = self.budget.oldest_usable(self.next_step)
        stale = [group for _, group in self._fresh.values() if group.policy_version < oldest]
        if stale:
            self.journal.drop([group.lease_id for group in stale], "stale")
            for group in stale:
                del self._fresh[group.lease_id]
        return stale

    def has_batch(self, *, num_answers: int, num_trained: int) -> bool:
        """Return whether `take` would find a batch now."""
        return bool(self._recorded) or self._chosen(num_answers, num_trained) is not None

    def take(self, *, num_answers: int, num_trained: int) -> TrainingBatch | None:
        """Take the next batch; return None if none is due. So far `num_answers` groups came, with and without signal, and
        `num_trained` were trained, counting every time."""
        if self._recorded:
            return self._take_recorded()
        chosen = self._chosen(num_answers, num_trained)
        if chosen is None:
            return None
        fresh, replayed, credit, last_answer = chosen
        last_step = self.next_step + self.budget.num_iterations
        lease_ids = [group.lease_id for group in fresh + replayed]
        self.journal.claim(RecordedBatch(self.next_step + 1, last_step, lease_ids, len(fresh), last_answer))
        for group in fresh:
            del self._fresh[group.lease_id]
        self._credit, self.last_answer = credit, last_answer
        return self._hand_over(self.next_step, 0, fresh, replayed)

    def _chosen(
        self, num_answers: int, num_trained: int
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], ReplayCredit, int] | None:
        """Return the groups that are trained for the first time, the replayed groups, the credit that is left then, and the last
        answer that the batch covers."""
        size, waiting = self.rule.size, list(self._fresh.values())
        covered = self.rule.last_answer(self._signals(), num_answers - self.last_answer)
        if covered is not None:
            waiting = [(number, group) for number, group in waiting if number <= self.last_answer + covered]
        fresh = [group for _, group in waiting[:size]]
        credit = self._credit.before(num_answers, num_trained + len(fresh))
        allowed = credit.allowed(size - len(fresh), num_answers, num_trained + len(fresh))
        replayed: list[RolloutGroup] = []
        if self.replay is not None and fresh and allowed:
            version = self.budget.version_at(self.next_step)
            replayed = self.replay.pick(allowed, step=self.next_step, version=version)
        if not fresh or not (covered is not None or (self.rule.waits_for_all and len(fresh) + len(replayed) == size)):
            return None
        return fresh, replayed, credit, waiting[-1][0] if covered is None else self.last_answer + covered

    def state(self) -> list[list[Any]]:
        """Return the replay table, for a checkpoint."""
        return [] if self.replay is None else self.replay.state()

    def restore(self, found: Recovery, step: int, load: Load, replay_state: list[list[Any]], last_answer: int) -> None:
        """Restore what a checkpoint after `step` steps had, whose batches covered the answers up to `last_answer`."""
        self._load = load
        self._recorded = deque(found.batches)
        self._resumed_at = step
        self.next_step = found.batches[0].step - 1 if found.batches else step
        self.last_answer = found.batches[-1].last_answer if found.batches else last_answer
        first_ready = min(found.ready.values(), default=self.last_answer + 1)  # may be of a batch that is undone
        self.last_answer = min(self.last_answer, first_ready - 1)
        for group, number in zip(load(list(found.ready)), found.ready.values(), strict=True):
            self.insert(group, number)
        if self.replay is not None:
            kept = [row for row in replay_state if row[0] not in found.not_replayable]
            ids = [row[0] for row in kept]
            self.replay.restore(kept, dict(zip(ids, load(ids), strict=True)))

    def _take_recorded(self) -> TrainingBatch:
        batch = self._recorded[0]
        groups = self._load(batch.lease_ids)
        self.journal.claim(batch)
        self._recorded.popleft()
        num_taken = max(0, self._resumed_at + 1 - batch.step)  # of its iterations, by the checkpoint
        return self._hand_over(batch.step - 1, num_taken, groups[: batch.num_fresh], groups[batch.num_fresh :])

    def _hand_over(
        self, step: int, num_taken: int, fresh: list[RolloutGroup], replayed: list[RolloutGroup]
    ) -> TrainingBatch:
        self.next_step = step + self.budget.num_iterations
        if self.replay is not None and num_taken == 0:  # else the checkpoint's table has them
            self.replay.sampled([group.lease_id for group in replayed])
            for group in fresh:
                self.replay.insert(group, self.signal(group))
            self.replay.expire(self.budget.version_at(self.next_step))
        return TrainingBatch(
            step + 1, self.budget.num_iterations - num_taken, self.next_step, fresh + replayed, len(fresh)
        )
