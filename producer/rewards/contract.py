"""The arguments that TRL's trainer passes to a reward function, and those of them that a function takes.

Guarantee: a function gets every argument that it takes by name, and no other. What it logs of a group is bounded: what is beyond
`MOST_METRICS` numbers and `MOST_COLUMNS` columns is left out.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from protocol.config.functions import REWARD_ARGUMENTS
from protocol.errors import ConfigError
from protocol.wire.messages import LOGGED_CHARS, MOST_COLUMNS, MOST_METRICS, NAME_CHARS, Logged, RunPlan

_COUNTED = "reasoning_tokens"  # for the function that asks for them
NOT_COLUMNS = (*REWARD_ARGUMENTS, "prompt", "completion", _COUNTED)


class TrainerState(msgspec.Struct, frozen=True):
    """The part of transformers' `TrainerState` that a producer knows: of when the policy of the group was made."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0

    @classmethod
    def of(cls, plan: RunPlan, version: int) -> "TrainerState":
        step = min(version * plan.steps_per_version, plan.max_steps)
        epoch = plan.num_epochs * step / max(1, plan.max_steps)
        return cls(step, plan.max_steps, epoch, math.ceil(plan.num_epochs))


class Logbook:
    """Gathers what a reward function logs of one group of `count` completions."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers: dict[str, list[float]] = {}
        self._extra: dict[str, tuple[str, ...]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Note a number. One that is not finite stays out of the mean."""
        number = float(value.item() if hasattr(value, "item") else value)
        name = _text(name, NAME_CHARS)
        if math.isfinite(number) and (name in self._numbers or len(self._numbers) < MOST_METRICS):
            total, count = self._numbers.get(name, (0.0, 0))
            self._numbers[name] = [total + number, count + 1]

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Note a value for each completion."""
        column, given = _text(column, NAME_CHARS), list(values)
        if len(given) != self._count:
            raise ValueError(
                f"log_extra({column!r}) has {len(given)} values for {self._count} completions; give one for each"
            )
        if column in self._extra or len(self._extra) < MOST_COLUMNS:
            self._extra[column] = tuple(_text(value, LOGGED_CHARS) for value in given)

    @property
    def logged(self) -> Logged:
        means = {name: total / count for name, (total, count) in self._numbers.items()}
        return Logged({name: mean for name, mean in means.items() if math.isfinite(mean)}, self._extra)


def _text(value: Any, limit: int) -> str:
    return f"{value!s:.{limit}}".encode(errors="replace").decode() or "-"


class Taken(NamedTuple):
    """The arguments that a function takes: those it needs, and all others (None: any)."""

    needed: tuple[str, ...]
    optional: frozenset[str] | None

    @classmethod
    def by(cls, function: Callable[..., Any], place: str) -> "Taken":
        """Raise ConfigError if the function takes an argument only by its position."""
        try:
            parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        except (TypeError, ValueError):  # of some functions that are not written in Python
            return cls((), None)
        kinds = inspect.Parameter
        by_name = [
            parameter for parameter in parameters if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        ]
        for parameter in parameters:
            if parameter.kind is kinds.POSITIONAL_ONLY and parameter.default is kinds.empty:
                raise ConfigError(
                    f"rewards.functions: {place} takes `{parameter.name}` by its position alone; remove the `/`, as arguments "
                    "are passed by name, as in TRL"
                )
        needed = tuple(one.name for one in by_name if one.default is kinds.empty)
        takes_all = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters)
        return cls(needed, None if takes_all else frozenset(one.name for one in by_name))

    def of(self, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = self.optional
        return arguments if taken is None else {name: value for name, value in arguments.items() if name in taken}

    @property
    def columns(self) -> list[str]:
        """The columns that the dataset must have."""
        return [name for name in self.needed if name not in (*REWARD_ARGUMENTS, _COUNTED)]
