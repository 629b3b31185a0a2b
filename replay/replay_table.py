"""The replay table: groups that were trained once and may be replayed, in place of groups whose rewards did not differ.

Guarantee: a group is trained at most `max_times_sampled` times, and never under a policy more than `max_age_versions` newer
than its own. `pick` takes nothing away and is a function of the contents, the seed and the step alone, so that a batch that is
selected again after a crash is the same one. Scores decay with age, and ties are decided for the newer group, so no choice of
sampler and remover freezes the table on the earliest data. No more trainings are taken than `rate` per delivered group, and
replays never run more than one batch ahead of the leased groups, which would otherwise come back too old.

A table is put together as in DeepMind's Reverb (arXiv:2102.04736): a sampler picks the groups to replay, a remover the group
that makes room, and a rate limiter (`ReplayCredit`) says how many.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from protocol.config.learning import ReplaySection
from replay.groups import RolloutGroup


@dataclass(frozen=True)
class ReplayCredit:
    """Credit for replays. Every delivered group earns `rate` trainings, whether it has signal or not; every training spends one,
    also the first one of a group. The rest may be spent on replays, and at most one batch of it is kept from batch to batch.
    More would let a long run of replays overtake groups that are still being generated, while leases rely on their order.

    Example: batches of 4, a rate of 1, at most 3 replays in a batch. 20 groups were delivered, and 7 have signal. The first
    batch takes 4 of these, and the second begins with the other 3:

        credit = ReplayCredit(size=4, rate=1.0, max_replayed=3)
        credit = credit.before(delivered=20, trained=4)     # 16 trainings are left; 4 are kept, and 12 forgotten
        credit.allowed(0, delivered=20, trained=4)          # 0, because the batch is full
        credit = credit.before(delivered=20, trained=7)     # 12 stay forgotten
        credit.allowed(1, delivered=20, trained=7)          # 1: the batch is missing 1, and 20 - 12 - 7 = 1 is left

    8 groups are trained then and nothing is left. If the next group has signal, it earns the training that it takes itself:

        credit = credit.before(delivered=21, trained=9)
        credit.allowed(3, delivered=21, trained=9)          # 0 = 21 - 12 - 9
    """

    size: int  # groups in a batch
    rate: float  # trainings per delivered group
    max_replayed: int  # of the groups in a batch; less than `size`
    forgotten: float = 0.0  # delivered groups whose trainings cannot be spent any more

    @property
    def least_fresh(self) -> int:
        """Leased groups that a batch takes at least, the others being replayed. In the example: max(4 / 1, 4 - 3) = 4; with a
        rate of 2 it would be 2."""
        return min(self.size, max(math.ceil(self.size / self.rate), self.size - self.max_replayed))

    def before(self, delivered: int, trained: int) -> "ReplayCredit":
        """Return the credit before a batch, whose new groups are among those that were `trained` so far."""
        return replace(self, forgotten=max(self.forgotten, delivered - (trained + self.size) / self.rate))

    def allowed(self, missing: int, delivered: int, trained: int) -> int:
        """Return how many of the groups that a batch is missing may be replayed ones."""
        left = math.floor(self.rate * (delivered - self.forgotten) - trained)
        return max(0, min(missing, self.max_replayed, left))


@dataclass(frozen=True, eq=False)
class ReplayEntry:
    """A group in the table."""

    group: RolloutGroup
    score: float  # above 0: how much the group can move the policy
    times_sampled: int  # the first training included


@dataclass(eq=False)
class ReplayTable:
    """The groups that may be replayed. Not safe for use from several threads."""

    settings: ReplaySection
    seed: int
    _entries: dict[str, ReplayEntry] = field(default_factory=dict)  # by group id, in order of insertion

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, group: RolloutGroup, score: float) -> None:
        """Keep a group after its first training, unless it is here already or its score is no positive number."""
        if group.lease_id not in self._entries:
            self._keep(ReplayEntry(group, score, times_sampled=1))

    def pick(self, num_groups: int, *, step: int, version: int) -> list[RolloutGroup]:
        """Pick at most `num_groups` groups to replay at `step`, at which they would train policy `version`."""
        usable = [entry for entry in self._entries.values() if not self._too_old(entry, version)]
        if len(usable) < self.settings.min_size:
            return []
        match self.settings.sampler:
            case "fifo":  # those inserted first
                chosen = usable[:num_groups]
            case "freshest":  # those of the newest policy; among equals those inserted last
                chosen = heapq.nlargest(num_groups, reversed(usable), key=lambda entry: entry.group.policy_version)
            case "prioritized":
                chosen = self._draw(usable, num_groups, np.random.default_rng([self.seed, step]))
        return [entry.group for entry in chosen]

    def sampled(self, lease_ids: Iterable[str]) -> None:
        """Count one more use of each; ids that are not here are ignored."""
        for entry in [self._entries[lease_id] for lease_id in lease_ids if lease_id in self._entries]:
            if entry.times_sampled + 1 < self.settings.max_times_sampled:
                self._entries[entry.group.lease_id] = replace(entry, times_sampled=entry.times_sampled + 1)
            else:
                del self._entries[entry.group.lease_id]

    def expire(self, version: int) -> None:
        """Drop the groups that are too old to train `version`."""
        self._entries = {name: entry for name, entry in self._entries.items() if not self._too_old(entry, version)}

    def state(self) -> list[list[Any]]:
        """[group id, times sampled, score] of every group, in order of insertion."""
        return [[lease_id, entry.times_sampled, entry.score] for lease_id, entry in self._entries.items()]

    def restore(self, state: Iterable[Sequence[Any]], groups: Mapping[str, RolloutGroup]) -> None:
        """Restore `state`, without entries that `groups` lacks or that the table's own limits, if they changed since, do not
        allow."""
        self._entries = {}
        for lease_id, times_sampled, score in state:
            if lease_id in groups and times_sampled < self.settings.max_times_sampled:
                self._keep(ReplayEntry(groups[lease_id], score, times_sampled))

    def _keep(self, entry: ReplayEntry) -> None:
        if not 0 < entry.score < math.inf:
            return
        self._entries[entry.group.lease_id] = entry
        if len(self._entries) > self.settings.max_size:
            entries = self._entries.values()  # of equals the one inserted first makes room: new data always gets in
            leaves = next(iter(entries)) if self.settings.remover == "oldest" else min(entries, key=self._log2_score)
            del self._entries[leaves.group.lease_id]

    def _too_old(self, entry: ReplayEntry, version: int) -> bool:
        return version - entry.group.policy_version > self.settings.max_age_versions

    def _log2_score(self, entry: ReplayEntry) -> float:
        """The logarithm of score x 0.5^(age in versions / half-life), but for a term that all entries have in common."""
        return math.log2(entry.score) + entry.group.policy_version / self.settings.half_life_versions

    def _draw(self, entries: list[ReplayEntry], count: int, rng: np.random.Generator) -> list[ReplayEntry]:
        """Draw at random with probability proportional to the decayed score (Schaul et al., arXiv:1511.05952, the proportional
        variant with alpha = 1), without replacement.

        The `count` largest of ln(score) + Gumbel noise are such a sample (Kool et al., arXiv:1903.06059); logarithms neither
        overflow nor vanish, however old a group is.
        """
        noise = rng.gumbel(size=len(entries))
        keys = np.array([self._log2_score(entry) for entry in entries]) * math.log(2) + noise
        return [entries[index] for index in np.argsort(-keys, kind="stable")[:count]]
