"""The replay table: groups that were trained once and may be replayed, in place of groups whose rewards did not differ.

Guarantee: a group is trained at most `max_times_sampled` times, and never under a policy more than `max_age_versions` newer
than the one that generated it. `pick` takes nothing away and is a function of the contents, the seed and the step alone, so
that a batch that is cut again after a crash is the same one.

A table is put together as in DeepMind's Reverb (arXiv:2102.04736): a sampler says which groups are replayed, a remover which
one makes room (both in selectors.py), a rate limiter how many (replay_credit.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protocol.config.sections.learning import ReplaySection
from replay.batches.selectors import (
    DecayedScore,
    Entry,
    LowestScore,
    Prioritized,
    Remover,
    Sampler,
    fifo,
    freshest,
    oldest,
)
from replay.groups import RolloutGroup


class ReplayTable:
    """See the module's guarantee. Not safe for use from several threads.

    Args:
        max_size: groups kept.
        max_times_sampled: times that one group is trained, the first one included.
        max_age_versions: versions by which a group may be older than the policy that it trains.
        min_size: groups without which none is replayed.
        samples_per_insert: for the credit from which replays are taken.
    """

    def __init__(
        self,
        sampler: Sampler,
        remover: Remover,
        *,
        max_size: int,
        min_size: int,
        max_times_sampled: int,
        max_age_versions: int,
        samples_per_insert: float,
        seed: int,
    ) -> None:
        self._sampler = sampler
        self._remover = remover
        self._max_size = max_size
        self._min_size = min_size
        self._max_times_sampled = max_times_sampled
        self._max_age_versions = max_age_versions
        self.samples_per_insert = samples_per_insert
        self._seed = seed
        self._entries: dict[str, Entry] = {}  # by group id, in order of insertion

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, group: RolloutGroup, score: float) -> None:
        """Keeps a group after its first training, unless it is here already or its score is no positive number."""
        if group.group_id not in self._entries:
            self._keep(Entry(group, score, times_sampled=1))

    def pick(self, num_groups: int, *, step: int, version: int) -> list[RolloutGroup]:
        """At most `num_groups` groups to replay at `step`.

        Args:
            version: the policy version that they would train.
        """
        usable = [entry for entry in self._entries.values() if not self._too_old(entry, version)]
        if len(usable) < self._min_size:
            return []
        return [entry.group for entry in self._sampler(usable, num_groups, np.random.default_rng([self._seed, step]))]

    def sampled(self, group_ids: Iterable[str]) -> None:
        """Counts one more use of each; ids that are not here are ignored."""
        for group_id in group_ids:
            entry = self._entries.get(group_id)
            if entry is None:
                continue
            if entry.times_sampled + 1 < self._max_times_sampled:
                self._entries[group_id] = replace(entry, times_sampled=entry.times_sampled + 1)
            else:
                del self._entries[group_id]

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
            if group_id in groups and times_sampled < self._max_times_sampled:
                self._keep(Entry(groups[group_id], score, times_sampled))

    def _keep(self, entry: Entry) -> None:
        if not 0 < entry.score < math.inf:
            return
        self._entries[entry.group.group_id] = entry
        if len(self._entries) > self._max_size:
            del self._entries[self._remover(self._entries.values()).group.group_id]

    def _too_old(self, entry: Entry, version: int) -> bool:
        return version - entry.group.policy_version > self._max_age_versions


def replay_table(settings: ReplaySection, seed: int) -> ReplayTable | None:
    """The table that the configuration describes; None if every group is trained once."""
    if settings.mode == "fifo":
        return None
    score = DecayedScore(settings.half_life_versions)
    samplers: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "prioritized": Prioritized(score)}
    removers: dict[str, Remover] = {"oldest": oldest, "lowest_score": LowestScore(score)}
    return ReplayTable(
        samplers[settings.sampler],
        removers[settings.remover],
        max_size=settings.max_size,
        min_size=settings.min_size,
        max_times_sampled=settings.max_times_sampled,
        max_age_versions=settings.max_age_versions,
        samples_per_insert=settings.samples_per_insert,
        seed=seed,
    )
