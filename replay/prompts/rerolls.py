"""Deferred rerolls: a prompt that no completion solved comes back when the policy is newer, and one that all solved rests.

Guarantee: a prompt waits to return at most once, never before its version is published, never more often than
`max_attempts` in an epoch; over any stretch of leases at most `max_share` of them, and a small burst, are rerolls; at most
`max_pending` wait. What waits is a function of the groups that were settled, so a checkpoint and the journal restore it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from replay.groups import RolloutGroup

Key = tuple[int, int, int]
"""Of a piece of work: epoch, prompt, and how often it had been deferred (0: the prompt's own turn)."""

Verdict = Literal["failed", "solved", "mixed", "unscored"]
_BURST = 8.0  # rerolls that may follow each other after a stretch without any


class Judgement(NamedTuple):
    """What the judging reward says of a group."""

    verdict: Verdict
    num_scored: int  # completions with that reward
    num_successes: int  # of them, above the threshold of failure


@dataclass(frozen=True)
class RerollRules:
    """Who returns, when, and how often.

    Args:
        column: the reward function that judges. One that judges alone, so that a reward for mere format, which every
            completion gets, does not hide a failure.
        fail_threshold: a completion whose reward is at or below it failed.
        solved_threshold: one at or above it solved the prompt.
        delay_versions: a failed prompt returns to a policy so many versions newer than the one that failed.
        max_attempts: times that a prompt returns in an epoch.
        solved_cooldown_epochs: epochs that a solved prompt sits out.
    """

    column: int = 0
    fail_threshold: float = 0.0
    solved_threshold: float = 1.0
    delay_versions: int = 4
    max_attempts: int = 0
    solved_cooldown_epochs: int = 0

    def judge(self, group: RolloutGroup) -> Judgement:
        rewards = group.rewards[:, self.column]
        scored = rewards[~np.isnan(rewards)]
        successes = int((scored > self.fail_threshold).sum())
        if len(scored) == 0:
            return Judgement("unscored", 0, 0)
        if successes == 0:
            return Judgement("failed", len(scored), 0)
        solved = bool((scored >= self.solved_threshold).all())
        return Judgement("solved" if solved else "mixed", len(scored), successes)

    def return_version(self, key: Key, verdict: str, policy_version: int) -> int | None:
        """The version at which a settled group's prompt comes back; None if it does not."""
        returns = verdict == "failed" and key[2] < self.max_attempts
        return policy_version + self.delay_versions if returns else None

    def rests_until(self, key: Key, verdict: str) -> int | None:
        """The last epoch that a settled group's prompt sits out; None if it sits out none."""
        return key[0] + self.solved_cooldown_epochs if verdict == "solved" and self.solved_cooldown_epochs else None


class RerollQueue:
    """What waits to return. The longest waiting give way when there are too many, and go first."""

    def __init__(self, *, max_share: float, max_pending: int) -> None:
        self._max_share = max_share
        self._max_pending = max_pending
        self._due: dict[Key, int] = {}  # version, in the order of deferral
        self._credit = 0.0  # rerolls that may be leased now

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def defer(self, key: Key, version: int) -> bool:
        """`key` returns at `version`. False if its prompt waits already."""
        if any(waiting[1] == key[1] for waiting in self._due):
            return False
        while len(self._due) >= self._max_pending:
            del self._due[next(iter(self._due))]
        self._due[key] = version
        return True

    def next_due(self, version: int) -> Key | None:
        """The first whose version is published, if another reroll is within the share."""
        if self._credit < 1.0:
            return None
        return next((key for key, due in self._due.items() if due <= version), None)

    def remove(self, key: Key) -> int:
        """`key` returns now; its version."""
        return self._due.pop(key)

    def withdraw(self, prompt_id: int) -> bool:
        """The prompt's own turn has come again: it does not return as well. Whether it waited."""
        waiting = [key for key in self._due if key[1] == prompt_id]
        for key in waiting:
            del self._due[key]
        return bool(waiting)

    def count_lease(self, is_reroll: bool) -> None:
        """A prompt was leased for the first time."""
        self._credit = min(_BURST, self._credit + self._max_share) - is_reroll

    def state(self) -> list[list[int]]:
        return [[*key, version] for key, version in self._due.items()]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        self._due = {(epoch, prompt_id, reroll): version for epoch, prompt_id, reroll, version in state}
