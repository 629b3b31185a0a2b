"""Which environments of Atropos there are, and how they share the engine.

Guarantee: an environment's share is its weight among those that asked lately, so one that died, which nobody is told of, does not
keep its share. At most 256 are known; beyond that, the one that was silent for longest is forgotten.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

_MAX_ENVIRONMENTS = 256
_HEARD_S = 60.0  # they ask for the status ten times a second
_MIN_SHARE = 0.01  # as Atropos has it

_Amount = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class Registration(msgspec.Struct):
    """What an environment reports of itself, in the fields of Atropos."""

    group_size: int
    max_token_length: _Amount
    weight: _Amount
    desired_name: str | None = None
    min_batch_allocation: Any = None


@dataclass
class _Environment:
    weight: float
    heard_at: float


class Environments:
    """See the module's guarantee."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._known: dict[int, _Environment] = {}

    def add(self, registration: Registration) -> int:
        """Returns its number."""
        if len(self._known) >= _MAX_ENVIRONMENTS:
            del self._known[min(self._known, key=lambda number: self._known[number].heard_at)]
        number = next(self._numbers)
        weight = max(0.0, registration.weight) * max(0.0, registration.max_token_length)
        self._known[number] = _Environment(weight, self._clock())
        return number

    def remove(self, number: Any) -> bool:
        """Whether there was such an environment."""
        return type(number) is int and self._known.pop(number, None) is not None

    def share_of(self, number: Any) -> float:
        """A share from 0.01 to 1. An environment that is not known has outlived a producer, and is not restrained."""
        mine = self._known.get(number) if type(number) is int else None
        if mine is None:
            return 1.0
        now = mine.heard_at = self._clock()
        total = sum(each.weight for each in self._known.values() if now - each.heard_at <= _HEARD_S)
        return max(_MIN_SHARE, mine.weight / total) if total else 1.0
