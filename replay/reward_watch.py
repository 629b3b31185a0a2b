"""The watch for a reward that has given no number to any completion of a run, while the others may work.

Guarantee: the groups that a reward should score are counted, whatever the reason why it did not. If it failed for all of the
first `max_groups` groups, the run ends; None and NaN, by which a function says that it does not apply, only warn.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.config.environments import SINGLE_TURN
from protocol.config.run import RunConfig
from protocol.errors import DataFailuresError
from protocol.wire.messages import MissingReward

_SCORED, _UNSCORED = "reward_scored/", "reward_unscored/"


class DeadReward(NamedTuple):
    name: str
    num_groups: int  # of which it scored no completion

    def __str__(self) -> str:
        groups = "the only group" if self.num_groups == 1 else f"all {self.num_groups} groups"
        return f"reward {self.name} gave no number to any completion of {groups}"


def dead_rewards(totals: Mapping[str, object]) -> list[DeadReward]:
    """Return the rewards that have scored nothing so far, by the totals of a run."""
    counted = [(name.removeprefix(_UNSCORED), count) for name, count in totals.items() if name.startswith(_UNSCORED)]
    return [
        DeadReward(name, count) for name, count in counted if isinstance(count, int) and not totals.get(_SCORED + name)
    ]


class RewardWatch:
    """Counts groups by reward and by whether it scored any of their completions. `columns` has the name of each reward and tells
    for which environments it is."""

    def __init__(
        self, columns: Sequence[tuple[str, Callable[[str], bool]]] = (), max_groups: int | None = None
    ) -> None:
        self._columns = columns
        self._max_groups = max_groups
        self._failed = Counter[str]()  # groups, by reward
        self._problem: dict[str, str] = {}  # the last of each reward

    @classmethod
    def of(cls, config: RunConfig) -> "RewardWatch":
        columns: list[tuple[str, Callable[[str], bool]]] = [
            (each.name, each.scores) for each in config.rewards.functions
        ]
        several = bool(config.environments)
        columns += [(name, lambda other, name=name: not several or other == name) for name in config.own_rewards]  # type: ignore[misc]
        return cls(columns, config.guards.max_groups_without_reward)

    def note(
        self,
        totals: Counter[str],
        environment: str,
        rewards: NDArray[np.float32] | None,
        missing: bytes,
        problem: str = "",
    ) -> None:
        """Note the `rewards` of a group (n, F), and why some are `missing`, encoded. None: nothing was scored, for this
        problem."""
        entries = msgspec.msgpack.decode(missing, type=list[MissingReward]) if missing else []
        problems = {entry.function: f"{entry.reason}: {entry.problem}" for entry in entries if not entry.completions}
        for column, (name, applies) in enumerate(self._columns):
            if not applies(environment or SINGLE_TURN):
                continue
            is_scored = rewards is not None and not np.isnan(rewards[:, column]).all()
            totals[(_SCORED if is_scored else _UNSCORED) + name] += 1
            if (why := problem if rewards is None else problems.get(name)) and not is_scored:
                self._failed[name] += 1
                self._problem[name] = why

    def dead(self, totals: Mapping[str, int]) -> dict[str, int]:
        """Return for each reward how many groups it had, if it scored nothing of any; else 0."""
        found = dict(dead_rewards(totals))
        return {name: found.get(name, 0) for name, _ in self._columns}

    def sentences(self, totals: Mapping[str, int]) -> list[str]:
        """Return a sentence for each reward that scored nothing."""
        return [f"{one}{self._why(one.name)}" for one in dead_rewards(totals)]

    def check(self, totals: Mapping[str, int]) -> None:
        """Raise DataFailuresError if a reward failed for all of too many groups."""
        if self._max_groups is None:
            return
        for one in dead_rewards(totals):
            if self._failed[one.name] >= self._max_groups:
                raise DataFailuresError(
                    f"{one}{self._why(one.name)}. Repair it, or remove it from rewards.functions, and go on with --resume; with "
                    "guards.max_groups_without_reward: null the others go on without it"
                )

    def _why(self, name: str) -> str:
        problem = self._problem.get(name, "")
        return f" ({problem.strip().splitlines()[-1]})" if problem else " (it returned None or NaN)"
