"""Whether a run still gets anything to learn from.

Guarantee: a run none of whose last groups had signal is told apart from one that merely waits: it ends with `NoSignalError`,
which says what the rewards were and what that usually comes from.
"""

import math

from protocol.errors import NoSignalError
from replay.groups import RolloutGroup


class SignalWatch:
    """The streak of groups without signal that goes on now; one of `max_groups` is hopeless, None: none is."""

    def __init__(self, max_groups: int | None) -> None:
        self._max_groups = max_groups
        self._forget()

    @property
    def is_bounded(self) -> bool:
        return self._max_groups is not None

    def _forget(self) -> None:
        self._num_groups = self._num_completions = self._num_truncated = 0
        self._low, self._high = math.inf, -math.inf  # of the mean rewards of the groups that were scored

    def note(self, group: RolloutGroup, mean_reward: float | None, *, has_signal: bool) -> None:
        """`mean_reward` is None if nothing of the group was scored."""
        if has_signal:
            self._forget()
            return
        self._num_groups += 1
        self._num_completions += group.num_completions
        self._num_truncated += int(group.was_truncated.sum())
        if mean_reward is not None:
            self._low, self._high = min(self._low, mean_reward), max(self._high, mean_reward)

    def check(self) -> None:
        """Raises NoSignalError if the streak is hopeless."""
        if self._max_groups is not None and self._num_groups >= self._max_groups:
            raise NoSignalError(self._describe(" (guards.max_groups_without_signal)"))

    def check_stalled(self, *, ever_had_signal: bool) -> None:
        """Nothing came for too long. Raises NoSignalError if that is because no group of the run ever had signal."""
        if self._num_groups and not ever_had_signal:
            raise NoSignalError(self._describe(", all that came before pipeline.stall_timeout_s ended the wait"))

    def _describe(self, bound: str) -> str:
        truncated = self._num_truncated / max(1, self._num_completions)
        head = f"none of the last {self._num_groups} groups had rewards that differ{bound}, so there is nothing to learn from"
        if self._low > self._high:
            return (
                f"{head}: no completion was scored at all. The reward functions returned None or NaN for every one; see what "
                "they were given with `slipstream journal show`, mend them, and go on with --resume"
            )
        if self._high - self._low < 1e-6:
            got = f"every completion was worth {self._low:g}"
        else:
            got = f"completions of a group were worth the same, from {self._low:g} in one group to {self._high:g} in another"
        return (
            f"{head}: {got}, and {truncated:.0%} of the completions were cut by sampling.max_completion_length. Likely causes: "
            "the reward function does not recognize answers in the form that the model gives (look at some: "
            "`slipstream journal show`); the task is far too hard or too easy for this model; completions are cut before the "
            "answer; sampling.temperature is so low that all completions of a prompt are alike. Mend it, and go on with --resume"
        )
