"""Why a lease did not become a group, as data: the class of every reason, and how often and when it is tried again.

Guarantee: every reason has a class. A *data* failure is the prompt's own (its reward raises, it is malformed); an
*infra* failure would have hit any prompt (a producer died, a lease expired). Each class has its own budget.
"""

from dataclasses import dataclass
from typing import Literal

FailureClass = Literal["data", "infra"]
_DATA = ("prompt_too_long", "bad_prompt", "reward_failed", "environment_failed")
_HOPELESS = ("prompt_too_long", "bad_prompt")
_MAX_BACKOFF_S = 60.0


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
