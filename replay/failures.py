"""Watches how many prompts are given up: of the run, and of each environment that it may go on without (`on_failure: skip`).

Guarantee: prompts of an environment that may be skipped count for it alone, so they never end the run while another environment
is left. What is skipped stays so until the trainer process ends; the next one tries it again.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from protocol.errors import DataFailuresError

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
