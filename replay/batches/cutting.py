"""Cutting batches: which groups the next optimizer steps train.

Guarantee: a batch is full, or partial where that is allowed; it begins with groups that are trained for the first time, at
least one, in the order they came and none too stale; groups that stand in for those without signal follow, within their
share, age and uses. The journal knows a batch before anybody sees it. Batches that a crash undid are cut again as they
were. Not thread-safe: the rollout buffer holds its lock.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from replay.batches.delivery import Arrival
from replay.batches.queue import FifoTable
from replay.batches.replay_table import ReplayTable
from replay.groups import RolloutGroup
from replay.journal.recovery import RecordedBatch, Recovery
from replay.journal.writer import Journal
from replay.prompts.staleness import StalenessBudget

Load = Callable[[Sequence[str]], list[RolloutGroup]]


class CutBatch(NamedTuple):
    """The groups of the next optimizer steps, and what is to be said of everything that arrived since the batch before."""

    step: int  # taken before the batch was first trained: its policy is the one that cut it
    num_iterations: int  # optimizer steps to take over it from now on
    last_step: int  # of them, counted from 1
    groups: list[RolloutGroup]
    num_fresh: int  # of the groups, which come first; the others stand in again
    arrivals: Sequence[Arrival] = ()


class BatchCutter:
    """See the module's guarantee.

    Args:
        budget: `max_staleness` bounds what is trained for the first time.
        signal: how much a group can move the policy, its score in the replay table.
        replay: the groups that may stand in, if any do.
        max_replayed: groups of a batch that may stand in, less than all.
        partial: whether `cut` may ever be asked for a partial batch.
    """

    def __init__(
        self,
        budget: StalenessBudget,
        journal: Journal,
        *,
        signal: Callable[[RolloutGroup], float],
        replay: ReplayTable | None = None,
        max_replayed: int = 0,
        partial: bool = False,
    ) -> None:
        if not 0 <= max_replayed < budget.groups_per_step:
            raise ValueError("a batch needs at least one group that is trained for the first time")
        self.budget = budget
        self.signal = signal
        self.partial = partial
        self.next_step = 0
        self._journal = journal
        self._fresh = FifoTable()
        self._replay = replay
        self._max_replayed = max_replayed
        self._forgotten = 0.0  # groups without signal for which nothing stood in, and nothing will any more
        self._recorded: deque[RecordedBatch] = deque()  # cut before a crash, to be cut again as they were
        self._resumed_at = 0
        self._load: Load

    @property
    def num_ready(self) -> int:
        """Groups that wait to be trained for the first time."""
        return len(self._fresh) + sum(batch.num_fresh for batch in self._recorded)

    @property
    def least_places(self) -> int:
        """Of the groups that leases count, a batch takes at least so many; the others stand in beyond that."""
        size = self.budget.groups_per_step
        if self._replay is None:
            return size
        return min(size, max(math.ceil(size / self._replay.samples_per_insert), size - self._max_replayed))

    @property
    def num_replayable(self) -> int:
        return 0 if self._replay is None else len(self._replay)

    def insert(self, group: RolloutGroup) -> None:
        self._fresh.insert(group)

    def remove_stale(self) -> list[RolloutGroup]:
        """Drops the groups that are too old by now, and returns them."""
        stale = self._fresh.older_than(self.budget.oldest_usable(self.next_step))
        if stale:
            self._journal.drop([group.group_id for group in stale], "stale")
            self._fresh.remove(stale)
        return stale

    def cut(self, *, num_generated: int, num_trained: int, partial: bool) -> CutBatch | None:
        """The next batch; None if there are too few groups.

        Args:
            num_generated: groups that arrived so far, with and without signal.
            num_trained: groups trained so far, counting every time.
            partial: whether fewer groups than a full batch will do.
        """
        if self._recorded:
            return self._cut_again()
        size = self.budget.groups_per_step
        fresh = self._fresh.first(size)
        samples = num_trained + len(fresh)
        forgotten = self._places_to_forget(num_generated, samples)
        again = self._stand_ins(size - len(fresh), num_generated - forgotten, samples) if fresh else []
        if not fresh or (len(fresh) + len(again) < size and not partial):
            return None
        last_step = self.next_step + self.budget.num_iterations
        groups = fresh + again
        self._journal.claim(self.next_step + 1, last_step, [group.group_id for group in groups], len(fresh))
        self._fresh.remove(fresh)
        self._forgotten = forgotten
        return self._hand_over(self.next_step, 0, groups, len(fresh))

    def state(self) -> list[list[Any]]:
        """The replay table, for a checkpoint."""
        return [] if self._replay is None else self._replay.state()

    def restore(self, found: Recovery, step: int, load: Load, replay_state: list[list[Any]]) -> None:
        self._load = load
        self._recorded = deque(found.batches)
        self._resumed_at = step
        self.next_step = found.batches[0].step - 1 if found.batches else step
        for group in load(found.ready):
            self._fresh.insert(group)
        if self._replay is not None:
            kept = [row for row in replay_state if row[0] not in found.not_replayable]
            ids = [row[0] for row in kept]
            self._replay.restore(kept, dict(zip(ids, load(ids), strict=True)))

    def _places_to_forget(self, num_generated: int, samples: int) -> float:
        """Leases are given so that the q-th group under way is trained in batch ceil(q / B) at the latest. One that
        stands in for a group without signal takes its place in that order; beyond one batch of such places, left from
        times when nothing could stand in, steps would run ahead of the groups under way."""
        if self._replay is None:
            return 0.0
        kept = (samples + self.budget.groups_per_step) / self._replay.samples_per_insert
        return max(self._forgotten, num_generated - kept)

    def _stand_ins(self, missing: int, inserts: float, samples: int) -> list[RolloutGroup]:
        if self._replay is None or missing == 0:
            return []
        return self._replay.pick(
            min(missing, self._max_replayed),
            step=self.next_step,
            version=self.budget.version_at(self.next_step),
            inserts=inserts,
            samples=samples,
        )

    def _cut_again(self) -> CutBatch:
        batch = self._recorded[0]
        groups = self._load(batch.group_ids)
        self._journal.claim(batch.step, batch.last_step, batch.group_ids, batch.num_fresh)
        self._recorded.popleft()
        taken = max(0, self._resumed_at + 1 - batch.step)  # of its iterations, by the checkpoint
        return self._hand_over(batch.step - 1, taken, groups, batch.num_fresh)

    def _hand_over(self, step: int, num_taken: int, groups: list[RolloutGroup], num_fresh: int) -> CutBatch:
        self.next_step = step + self.budget.num_iterations
        if self._replay is not None and num_taken == 0:  # else the checkpoint's table has them
            self._replay.sampled([group.group_id for group in groups[num_fresh:]])
            for group in groups[:num_fresh]:
                self._replay.insert(group, self.signal(group))
            self._replay.expire(self.budget.version_at(self.next_step))
        return CutBatch(step, self.budget.num_iterations - num_taken, self.next_step, groups, num_fresh)
