"""The replay table: groups that were trained once and may stand in again, for groups whose rewards did not differ.

Guarantee: a group is trained at most `max_times_sampled` times, never under a policy more than `max_age_versions` newer
than the one that generated it, and not before the rate limiter allows it; `pick` takes nothing away and is a function
of the contents, the seed and the step alone, so that a batch that is cut again after a crash is the same one.

A table is put together as in DeepMind's Reverb (arXiv:2102.04736): a sampler says which groups stand in, a remover which
one makes room (both in selectors.py), a rate limiter how many.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from protocol.config.learning import ReplaySection
from protocol.errors import ConfigError
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

_MOST_SAMPLES_PER_INSERT = 1e6


@dataclass(frozen=True)
class RateLimiter:
    """Bounds how often the table is sampled for each group that is generated.

    Raises:
        ValueError: the table would never be sampled.
    """

    samples_per_insert: float
    min_size: int

    def __post_init__(self) -> None:
        if not 0 < self.samples_per_insert <= _MOST_SAMPLES_PER_INSERT:
            raise ValueError(
                f"samples_per_insert={self.samples_per_insert} must be above 0, or no group ever stands in, and at most "
                f"{_MOST_SAMPLES_PER_INSERT:.0f}; 1 trains as many groups as are generated"
            )
        if self.min_size < 1:
            raise ValueError(f"min_size={self.min_size} must be at least 1: an empty table has nothing to sample")

    def allowed(self, inserts: float, samples: int, size: int) -> int:
        """How many groups may stand in now.

        Args:
            inserts: groups generated so far, with and without signal.
            samples: groups trained so far, counting every time.
            size: groups that could stand in.
        """
        if size < self.min_size:
            return 0
        return max(0, math.floor(self.samples_per_insert * inserts - samples))


class ReplayTable:
    """See the module's guarantee. Not safe for use from several threads.

    Args:
        max_size: groups kept.
        max_times_sampled: times that one group is trained, the first one included.
        max_age_versions: versions by which a group may be older than the policy that it trains.

    Raises:
        ValueError: with these arguments no group could ever stand in.
    """

    def __init__(
        self,
        sampler: Sampler,
        remover: Remover,
        limiter: RateLimiter,
        *,
        max_size: int,
        max_times_sampled: int,
        max_age_versions: int,
        seed: int,
    ) -> None:
        if limiter.min_size > max_size:
            raise ValueError(
                f"min_size={limiter.min_size} is above max_size={max_size}, so the table could never be sampled: lower "
                "min_size or raise max_size"
            )
        if max_times_sampled < 2:
            raise ValueError(
                f"max_times_sampled={max_times_sampled} leaves nothing to replay, as the first training counts: set at "
                "least 2, or mode=fifo"
            )
        if max_age_versions < 1:
            raise ValueError(
                f"max_age_versions={max_age_versions} must be at least 1: a group that was trained is older than the "
                "policy that came of it"
            )
        if seed < 0:
            raise ValueError(f"seed={seed} must be at least 0: numpy's generators take no negative seed")
        self._sampler = sampler
        self._remover = remover
        self._limiter = limiter
        self._max_size = max_size
        self._max_times_sampled = max_times_sampled
        self._max_age_versions = max_age_versions
        self._seed = seed
        self._entries: dict[str, Entry] = {}  # by group id, in order of insertion

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def samples_per_insert(self) -> float:
        return self._limiter.samples_per_insert

    def insert(self, group: RolloutGroup, score: float) -> None:
        """Keeps a group after its first training, unless it is here already or its score is no positive number."""
        if group.group_id not in self._entries:
            self._keep(Entry(group, score, times_sampled=1))

    def pick(self, num_groups: int, *, step: int, version: int, inserts: float, samples: int) -> list[RolloutGroup]:
        """At most `num_groups` groups to stand in at `step`; none if the limiter says so.

        Args:
            version: the policy version that they would train.
            inserts: as in `RateLimiter.allowed`.
            samples: as in `RateLimiter.allowed`, with what the batch holds already.
        """
        usable = [entry for entry in self._entries.values() if not self._too_old(entry, version)]
        count = min(num_groups, self._limiter.allowed(inserts, samples, len(usable)))
        if count <= 0:
            return []
        return [entry.group for entry in self._sampler(usable, count, np.random.default_rng([self._seed, step]))]

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

    def expire(self, version: int) -> int:
        """Drops the groups that are too old to train `version`. Returns how many."""
        gone = [group_id for group_id, entry in self._entries.items() if self._too_old(entry, version)]
        self.discard(gone)
        return len(gone)

    def discard(self, group_ids: Iterable[str]) -> None:
        """Drops these groups; ids that are not here are ignored."""
        for group_id in group_ids:
            self._entries.pop(group_id, None)

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
    """The table that the configuration describes; None if every group is trained once.

    Raises:
        ConfigError: the settings would never let a group stand in.
    """
    if settings.mode == "fifo":
        return None
    try:
        score = DecayedScore(settings.half_life_versions)
        samplers: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "prioritized": Prioritized(score)}
        removers: dict[str, Remover] = {"oldest": oldest, "lowest_score": LowestScore(score)}
        return ReplayTable(
            samplers[settings.sampler],
            removers[settings.remover],
            RateLimiter(settings.samples_per_insert, settings.min_size),
            max_size=settings.max_size,
            max_times_sampled=settings.max_times_sampled,
            max_age_versions=settings.max_age_versions,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(f"replay: {error}") from error
