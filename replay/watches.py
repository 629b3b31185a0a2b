"""Watches over a run: how many prompts are given up, and whether a reward ever gives a number.

Guarantee: prompts of an environment that may be skipped (`on_failure: skip`) count for it alone, so they never end the run while
another environment is left. What is skipped stays so until the trainer process ends; the next one tries it again. The groups that
a reward should score are counted, whatever the reason why it did not. If it failed for all of the first `max_groups` groups, the
run ends; None and NaN, by which a function says that it does not apply, only warn.
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.config.environments import SINGLE_TURN
from protocol.config.run import RunConfig
from protocol.errors import DataFailuresError
from protocol.wire.messages import MissingReward

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 64
"""The number of finished prompts over which the share of dead letters is judged."""
IN_A_ROW = 16
"""Prompts of an environment that may be skipped which, given up one after the other, are enough."""

SKIPPED = "skipped_environments"
"""The fact of a journal that names them."""


class Skip(NamedTuple):
    """The reason to go on without an environment: so many of its last prompts were given up."""

    given_up: int
    of: int
    reason: str  # of the last one
    at: float  # Unix time


class FailureWatch:
    """The last finished prompts. At most the share `max_share` of them may be dead letters.

    Args:
        environments: those that prompts have, in a run with several.
        may_skip: of these, those that the run may go on without.

    Attributes:
        skipped: the environments that the run goes on without. It is replaced and never changed, so any thread may read it.
    """

    def __init__(self, max_share: float, environments: Collection[str] = (), may_skip: Collection[str] = ()) -> None:
        self._max_share = max_share
        self._finished: deque[str | None] = deque(maxlen=FAILURE_WINDOW)
        self._finished_of = {name: deque[str | None](maxlen=FAILURE_WINDOW) for name in may_skip}
        self.environments = frozenset(environments)
        self.skipped: Mapping[str, Skip] = {}

    def note(self, environment: str = "", given_up: str | None = None) -> None:
        """Note that a prompt of an environment has its group, or the reason why it is a dead letter."""
        self._finished_of.get(environment, self._finished).append(given_up)

    def due(self) -> Iterator[tuple[str, Skip]]:
        """Yield the environments to skip now. One is left, if all others are skipped."""
        for name in self._finished_of:
            found = self._failing(name)
            if found is not None and name not in self.skipped and self.environments - {name, *self.skipped}:
                yield name, found

    def with_skipped(self, name: str, skip: Skip) -> dict[str, str]:
        """Return the fact of a journal that names an environment to skip beside those that are skipped."""
        return {SKIPPED: json.dumps(dict(self.skipped) | {name: skip})}

    def skip(self, name: str, skip: Skip) -> None:
        """Go on without an environment, and say so."""
        self.skipped = {**self.skipped, name: skip}
        logger.error(
            "environments.%s: %d of its last %d prompts were given up, so the run goes on without it (on_failure: skip). The "
            "last one: %s. Repair it, stop the run and start it with --resume, which tries it again",
            name, skip.given_up, skip.of, skip.reason,
        )  # fmt: skip

    def check(self) -> None:
        """Raise DataFailuresError if too many are dead letters, or no environment is left."""
        reasons = [reason for reason in self._finished if reason is not None]
        if len(self._finished) == FAILURE_WINDOW and len(reasons) > self._max_share * FAILURE_WINDOW:
            raise DataFailuresError(
                f"{len(reasons)} of the last {FAILURE_WINDOW} prompts were given up, more than "
                f"pipeline.max_failed_share={self._max_share} allows. The last one: {reasons[-1]}"
            )
        failing = {name: found for name in self._finished_of if (found := self._failing(name)) is not None}
        if failing and self.environments <= failing.keys() | self.skipped.keys():
            name, last = next((name, found) for name, found in failing.items() if name not in self.skipped)
            raise DataFailuresError(
                f"environments: none is left. Skipped were {', '.join(self.skipped) or 'none'}, and {last.given_up} of the last "
                f"{last.of} prompts of {name} were given up. The last one: {last.reason}"
            )

    def _failing(self, name: str) -> Skip | None:
        """Return why the run should go on without an environment, if it should."""
        finished = self._finished_of[name]
        reasons = [reason for reason in finished if reason is not None]
        too_many = len(finished) == FAILURE_WINDOW and len(reasons) > self._max_share * FAILURE_WINDOW
        in_a_row = len(finished) >= IN_A_ROW and None not in list(finished)[-IN_A_ROW:]
        return Skip(len(reasons), len(finished), _in_short(reasons[-1]), time.time()) if too_many or in_a_row else None


def _in_short(reason: str) -> str:
    """Return the first and the last line of a reason, which may end in a traceback."""
    lines = reason.strip().splitlines() or [""]
    return ": ".join(dict.fromkeys(line.strip().rstrip(":")[:500] for line in (lines[0], lines[-1])))


def skipped_before(facts: Mapping[str, str]) -> dict[str, Skip]:
    """Return the environments that the facts of a journal call skipped."""
    return {name: Skip(*skip) for name, skip in json.loads(facts.get(SKIPPED, "{}")).items()}


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
    """Counts groups by reward and by whether it scored any of their completions. `columns` has the name of each reward and the
    environments that it is for; None: all."""

    def __init__(
        self, columns: Sequence[tuple[str, Collection[str] | None]] = (), max_groups: int | None = None
    ) -> None:
        self._columns = columns
        self._max_groups = max_groups
        self._failed = Counter[str]()  # groups, by reward
        self._problem: dict[str, str] = {}  # the last of each reward

    @classmethod
    def of(cls, config: RunConfig) -> "RewardWatch":
        columns: list[tuple[str, Collection[str] | None]] = [
            (function.name, function.environments) for function in config.rewards.functions
        ]
        columns += [(name, [name] if config.environments else None) for name in config.own_rewards]
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
        for column, (name, environments) in enumerate(self._columns):
            if environments is not None and (environment or SINGLE_TURN) not in environments:
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
