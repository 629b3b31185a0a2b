"""The chance that the next group of a prompt has signal, estimated from the groups that came before.

Guarantee: an estimate is the share of groups with signal among those of prompts of the same source whose last group had the
same verdict. What is known fades with the policies: its weight halves in `HALF_LIFE` versions. What is not known is 1, so that
it is tried. The table grows with the sources and with the prompts that were answered, and with nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

HALF_LIFE = 16.0
"""Versions in which the weight of a group halves."""

_PRIOR = 2.0  # groups with signal, which every estimate begins with
_NEW = "new"  # no group of the prompt is here yet
VERDICTS = ("failed", "solved", "mixed", "unscored", _NEW)


class GradedGroup(NamedTuple):
    """A group that arrived, as far as it tells of its prompt. The verdict is that of `replay.rerolls`."""

    prompt_id: int
    verdict: str
    has_signal: bool
    policy_version: int
    num_scored: int = 0  # completions
    num_successes: int = 0  # of them
    reroll: int = 0  # of the prompt, 0 for its first attempt


class _Kind(NamedTuple):
    """Prompts of one source, by the verdict of their last group."""

    source: int
    verdict: str


class _Evidence(NamedTuple):
    """Faded counts, as of a version."""

    with_signal: float
    groups: float
    version: int

    def at(self, version: int) -> "_Evidence":
        """Return the counts as they weigh at a version; not later than they are."""
        if version <= self.version:
            return self
        left = 0.5 ** ((version - self.version) / HALF_LIFE)
        return _Evidence(self.with_signal * left, self.groups * left, version)


class Estimate(NamedTuple):
    """The chance that a group of some kind of prompts has signal, and the faded counts behind it."""

    chance: float
    with_signal: float
    groups: float


class SignalChances:
    """The table of estimates. `source_of` tells the source of a prompt."""

    def __init__(self, source_of: Callable[[int], int]) -> None:
        self._source_of = source_of
        self._verdicts: dict[int, str] = {}  # of the last group of each prompt
        self._evidence: dict[_Kind, _Evidence] = {}

    def note(self, group: GradedGroup) -> None:
        """Learn from a group that arrived."""
        kind = self._kind(group.prompt_id)
        known = self._evidence.get(kind, _Evidence(0.0, 0.0, group.policy_version)).at(group.policy_version)
        self._evidence[kind] = _Evidence(known.with_signal + group.has_signal, known.groups + 1.0, known.version)
        self._verdicts[group.prompt_id] = group.verdict

    def chance(self, prompt_id: int, version: int) -> float:
        """Return the estimate for a group of this policy: (s + 2) / (n + 2) of n faded groups, s of them with signal."""
        known = self._evidence.get(self._kind(prompt_id))
        return 1.0 if known is None else _estimate(known.at(version)).chance

    def estimates(self, version: int) -> dict[tuple[int, str], Estimate]:
        """Return what is known for groups of this policy, by source and verdict of the last group."""
        return {(kind.source, kind.verdict): _estimate(known.at(version)) for kind, known in self._evidence.items()}

    def state(self) -> dict[str, Any]:
        """Return all that is known as plain data."""
        return {
            "verdicts": [[prompt_id, verdict] for prompt_id, verdict in self._verdicts.items()],
            "evidence": [[*kind, *evidence] for kind, evidence in self._evidence.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._verdicts = dict(state["verdicts"])
        self._evidence = {
            _Kind(source, verdict): _Evidence(*numbers) for source, verdict, *numbers in state["evidence"]
        }

    def _kind(self, prompt_id: int) -> _Kind:
        return _Kind(self._source_of(prompt_id), self._verdicts.get(prompt_id, _NEW))


def _estimate(known: _Evidence) -> Estimate:
    chance = (known.with_signal + _PRIOR) / (known.groups + _PRIOR)
    return Estimate(chance, known.with_signal, known.groups)
