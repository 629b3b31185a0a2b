"""The replay table: groups that were trained once and may be replayed, in place of groups whose rewards did not differ.

Guarantee: a group is trained at most `max_times_sampled` times, and never under a policy more than `max_age_versions` newer
than the one that generated it. `pick` takes nothing away and is a function of the contents, the seed and the step alone, so
that a batch that is cut again after a crash is the same one. Scores decay with age and equals are decided for the newer group,
so no choice of sampler and remover freezes the table on the earliest data.

A table is put together as in DeepMind's Reverb (arXiv:2102.04736): a sampler says which groups are replayed, a remover which
one makes room, a rate limiter how many (replay_credit.py).
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from protocol.config.learning import ReplaySection
from replay.groups import RolloutGroup


@dataclass(frozen=True, eq=False)
class Entry:
    """A group in the table."""

    group: RolloutGroup
    score: float  # above 0: how much the group can move the policy
    times_sampled: int  # the first training included


@dataclass(eq=False)
class ReplayTable:
    """See the module's guarantee. Not safe for use from several threads."""

    settings: ReplaySection
    seed: int
    _entries: dict[str, Entry] = field(default_factory=dict)  # by group id, in order of insertion

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, group: RolloutGroup, score: float) -> None:
        """Keeps a group after its first training, unless it is here already or its score is no positive number."""
        if group.group_id not in self._entries:
            self._keep(Entry(group, score, times_sampled=1))

    def pick(self, num_groups: int, *, step: int, version: int) -> list[RolloutGroup]:
        """At most `num_groups` groups to replay at `step`, at which they would train policy `version`."""
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

    def sampled(self, group_ids: Iterable[str]) -> None:
        """Counts one more use of each; ids that are not here are ignored."""
        for entry in [self._entries[group_id] for group_id in group_ids if group_id in self._entries]:
            if entry.times_sampled + 1 < self.settings.max_times_sampled:
                self._entries[entry.group.group_id] = replace(entry, times_sampled=entry.times_sampled + 1)
            else:
                del self._entries[entry.group.group_id]

    def expire(self, version: int) -> None:
        """Drops the groups that are too old to train `version`."""
        self._entries = {name: entry for name, entry in self._entries.items() if not self._too_old(entry, version)}

    def state(self) -> list[list[Any]]:
        """[group id, times sampled, score] of every group, in order of insertion."""
        return [[group_id, entry.times_sampled, entry.score] for group_id, entry in self._entries.items()]

    def restore(self, state: Iterable[Sequence[Any]], groups: Mapping[str, RolloutGroup]) -> None:
        """Goes on from `state`, without what `groups` lacks and what the table's own limits, if they have changed since,
        do not allow any more."""
        self._entries = {}
        for group_id, times_sampled, score in state:
            if group_id in groups and times_sampled < self.settings.max_times_sampled:
                self._keep(Entry(groups[group_id], score, times_sampled))

    def _keep(self, entry: Entry) -> None:
        if not 0 < entry.score < math.inf:
            return
        self._entries[entry.group.group_id] = entry
        if len(self._entries) > self.settings.max_size:
            entries = self._entries.values()  # of equals the one inserted first makes room: new data always gets in
            leaves = next(iter(entries)) if self.settings.remover == "oldest" else min(entries, key=self._log2_score)
            del self._entries[leaves.group.group_id]

    def _too_old(self, entry: Entry, version: int) -> bool:
        return version - entry.group.policy_version > self.settings.max_age_versions

    def _log2_score(self, entry: Entry) -> float:
        """The logarithm of score x 0.5^(age in versions / half-life), but for a term that all entries have in common."""
        return math.log2(entry.score) + entry.group.policy_version / self.settings.half_life_versions

    def _draw(self, entries: list[Entry], count: int, rng: np.random.Generator) -> list[Entry]:
        """At random with probability proportional to the decayed score (Schaul et al., arXiv:1511.05952, the proportional
        variant with alpha = 1), without replacement.

        The `count` largest of ln(score) + Gumbel noise are such a sample (Kool et al., arXiv:1903.06059); logarithms neither
        overflow nor vanish, however old a group is.
        """
        noise = rng.gumbel(size=len(entries))
        keys = np.array([self._log2_score(entry) for entry in entries]) * math.log(2) + noise
        return [entries[index] for index in np.argsort(-keys, kind="stable")[:count]]
