"""Why a lease did not become a group, as data: the class of every reason, and how often and when it is tried again.

Guarantee: every reason has a class. A *data* failure is the prompt's own (its reward raises, it is malformed); an
*infra* failure would have hit any prompt (a producer died, a lease expired). Each class has its own budget. A run most of whose
prompts are given up ends, and says why the last one was.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from protocol.errors import DataFailuresError

FailureClass = Literal["data", "infra"]
_DATA = ("prompt_too_long", "bad_prompt", "reward_failed", "environment_failed")
_HOPELESS = ("prompt_too_long", "bad_prompt")
_MAX_BACKOFF_S = 60.0
FAILURE_WINDOW = 64
"""Finished prompts over which the share of those that were given up is judged."""


def failure_class(reason: str) -> FailureClass:
    return "data" if reason in _DATA else "infra"


def is_hopeless(reason: str) -> bool:
    """Whether another attempt would fail in the same way."""
    return reason in _HOPELESS


@dataclass(frozen=True)
class RetryBudget:
    """So many attempts of a prompt may fail, and how long it waits after each."""

    max_attempts: int
    backoff_s: float

    def delay_s(self, failures: int) -> float:
        """The wait after failure number `failures` (from 1): doubling, at most a minute."""
        return min(_MAX_BACKOFF_S, self.backoff_s * 2.0 ** min(failures - 1, 30))


class FailureWatch:
    """The last finished prompts, of which the share `max_share` may have been given up."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._finished: deque[str | None] = deque(maxlen=FAILURE_WINDOW)

    def note(self, given_up: str | None = None) -> None:
        """A prompt has its group, or was given up, and why."""
        self._finished.append(given_up)

    def check(self) -> None:
        """Raises DataFailuresError if too many were given up."""
        reasons = [reason for reason in self._finished if reason is not None]
        if len(self._finished) == FAILURE_WINDOW and len(reasons) > self._max_share * FAILURE_WINDOW:
            raise DataFailuresError(
                f"{len(reasons)} of the last {FAILURE_WINDOW} prompts were given up, more than "
                f"pipeline.max_failed_share={self._max_share} allows. The last one: {reasons[-1]}"
            )
