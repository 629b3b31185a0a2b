"""Why rewards of a group are missing, as it travels to the trainer.

Guarantee: what failed alike is one entry; there are at most `MOST`, each with the end of what was said.
"""

from collections.abc import Iterable

from protocol.wire.messages import MissingReward

MOST, _CHARACTERS = 16, 500


class RewardFailures:
    """Of one group."""

    def __init__(self) -> None:
        self._completions: dict[tuple[str, str, str], list[int]] = {}

    def add(self, function: str, reason: str, problem: str, completions: Iterable[int] = ()) -> None:
        """`completions` are the numbers of those that it is about; without any it is about all."""
        self._completions.setdefault((function, reason, problem[-_CHARACTERS:]), []).extend(completions)

    def entries(self) -> tuple[MissingReward, ...]:
        found = list(self._completions.items())[:MOST]
        return tuple(MissingReward(*failure, tuple(completions)) for failure, completions in found)
