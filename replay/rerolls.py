"""Rerolls: a prompt that no completion solved returns to a newer policy, and one that all solved goes into cooldown.

Guarantee: a prompt returns at most `max_attempts` times in an epoch. Over any stretch of leases at most `max_share` of them,
and a small burst, are rerolls. What is deferred follows from the groups that were settled, so a checkpoint and the journal
restore it (`replay.prompt_ledger`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from protocol.config.learning import RerollSection
from replay.groups import RolloutGroup
from replay.lease_ids import Key
from replay.sources import ONE, Sources

Verdict = Literal["failed", "solved", "mixed", "unscored"]
_BURST = 8.0  # rerolls that may follow each other after a stretch without any


class Grade(NamedTuple):
    """The judgement of a group by one reward."""

    verdict: Verdict
    num_scored: int  # completions with that reward
    num_successes: int  # of them, above the threshold of failure


@dataclass(frozen=True)
class RerollRules:
    """The rules by which prompts return. One reward function judges alone, so that a reward for mere format, which every
    completion gets, does not hide a failure. If it scored nothing, the first of `others` judges that did: of several environments
    each has its own rewards."""

    settings: RerollSection
    column: int = 0  # of that function
    others: tuple[int, ...] = ()
    sources: Sources = ONE
    judges: tuple[int, ...] = ()  # of each source the column that judges in place of `column`; empty: of none

    def grade(self, group: RolloutGroup) -> Grade:
        scored = np.zeros(0, np.float32)
        first = self.judges[self.sources.number_of(group.lease.key.prompt_id)] if self.judges else self.column
        for column in (first, *self.others):
            rewards = group.rewards[:, column : column + 1]  # none where teachers alone teach
            scored = rewards[~np.isnan(rewards)]
            if len(scored):
                break
        successes = int((scored > self.settings.fail_threshold).sum())
        if len(scored) == 0:
            return Grade("unscored", 0, 0)
        if successes == 0:
            return Grade("failed", len(scored), 0)
        solved = bool((scored >= self.settings.solved_threshold).all())
        return Grade("solved" if solved else "mixed", len(scored), successes)

    def return_version(self, key: Key, verdict: str, policy_version: int) -> int | None:
        """The version at which the prompt of a settled group returns; None if it does not."""
        returns = verdict == "failed" and key.reroll < self.settings.max_attempts
        return policy_version + self.settings.delay_versions if returns else None

    def cooldown_until(self, key: Key, verdict: str) -> int | None:
        """The last epoch that the prompt of a settled group sits out; None if it sits out none."""
        num_epochs = self.settings.solved_cooldown_epochs
        return key.epoch + num_epochs if verdict == "solved" and num_epochs else None


@dataclass
class RerollShare:
    """Keeps rerolls to their share of the leases, but for a small burst."""

    max_share: float
    _credit: float = 0.0  # rerolls that may be leased now

    @property
    def allows_one(self) -> bool:
        return self._credit >= 1.0

    def count_lease(self, is_reroll: bool) -> None:
        """A prompt was leased for the first time."""
        self._credit = min(_BURST, self._credit + self.max_share) - is_reroll


def attempt_counts(reroll: int) -> tuple[str, str, str]:
    """Return the names of the totals of groups, scored completions and successes of prompts that returned `reroll` times."""
    return (f"attempt_{reroll + 1}_groups", f"attempt_{reroll + 1}_scored", f"attempt_{reroll + 1}_successes")
