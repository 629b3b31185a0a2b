"""Which groups of the replay table are replayed, and which one makes room.

Guarantee: a choice depends on the entries, their order and the random numbers alone. Scores decay with age and equals are
decided for the newer group, so no choice of sampler and remover freezes the table on the earliest data.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from replay.groups import RolloutGroup


@dataclass(frozen=True, eq=False)
class Entry:
    """A group in the table. `score` is above 0 and says how much the group can move the policy."""

    group: RolloutGroup
    score: float
    times_sampled: int  # the first training included


class Sampler(Protocol):
    """Chooses at most `count` of `entries`, which are in order of insertion, without replacement."""

    def __call__(self, entries: Sequence[Entry], count: int, rng: np.random.Generator) -> list[Entry]: ...


class Remover(Protocol):
    """Chooses the one of `entries`, which are in order of insertion, that makes room."""

    def __call__(self, entries: Iterable[Entry]) -> Entry: ...


@dataclass(frozen=True)
class DecayedScore:
    """score x 0.5^(age / half_life_versions), where the age is in policy versions."""

    half_life_versions: float

    def log2(self, entry: Entry) -> float:
        """Its logarithm, but for log2 of 0.5^(version now / half-life), which all entries have in common."""
        return math.log2(entry.score) + entry.group.policy_version / self.half_life_versions


def fifo(entries: Sequence[Entry], count: int, rng: np.random.Generator) -> list[Entry]:
    """Those inserted first."""
    return list(entries[:count])


def freshest(entries: Sequence[Entry], count: int, rng: np.random.Generator) -> list[Entry]:
    """Those of the newest policy; among equals those inserted last."""
    return heapq.nlargest(count, reversed(entries), key=lambda entry: entry.group.policy_version)


@dataclass(frozen=True)
class Prioritized:
    """At random with probability proportional to the decayed score (Schaul et al., arXiv:1511.05952, the proportional
    variant with alpha = 1), without replacement.

    The `count` largest of ln(score) + Gumbel noise are such a sample (Kool et al., arXiv:1903.06059); logarithms neither
    overflow nor vanish, however old a group is.
    """

    score: DecayedScore

    def __call__(self, entries: Sequence[Entry], count: int, rng: np.random.Generator) -> list[Entry]:
        noise = rng.gumbel(size=len(entries))
        keys = np.array([self.score.log2(entry) for entry in entries]) * math.log(2) + noise
        return [entries[index] for index in np.argsort(-keys, kind="stable")[:count]]


def oldest(entries: Iterable[Entry]) -> Entry:
    """The one inserted first."""
    return next(iter(entries))


@dataclass(frozen=True)
class LowestScore:
    """The one with the lowest decayed score; among equals the one inserted first, so that new data always gets in."""

    score: DecayedScore

    def __call__(self, entries: Iterable[Entry]) -> Entry:
        return min(entries, key=self.score.log2)
