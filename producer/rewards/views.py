"""The part of a group that one reward function sees, and its scores as scores of the whole group.

Guarantee: a function that shall not see reasoning never does, and a completion whose reasoning does not end gets what
`rewards.thinking.unclosed` says.
"""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from producer.rewards.thinking import Reasoning
from producer.rewards.worker import Job, Scores
from protocol.config.sections.rewards import RewardFunction, RewardsSection


@dataclass(frozen=True)
class View:
    """Args:
    job: what the function is given.
    rows: the rows of the group that the job has.
    num_rows: of the group.
    default_reward: of the other rows; NaN excludes them.
    """

    job: Job
    rows: list[int]
    num_rows: int
    default_reward: float = math.nan

    @classmethod
    def of(cls, section: RewardsSection, function: RewardFunction, job: Job, reasoning: Reasoning | None) -> "View":
        num_rows, unclosed = len(job.completions), section.thinking.unclosed
        rows = list(range(num_rows))
        if reasoning is not None and function.counts_reasoning:
            job = replace(job, reasoning_tokens=reasoning.num_tokens)
        elif reasoning is not None and section.strips(function):
            answers, is_closed = reasoning.answers, reasoning.is_closed
            if unclosed == "as_is":
                shown = [answers[row] if is_closed[row] else job.completions[row] for row in rows]
                return cls(replace(job, completions=shown), rows, num_rows)
            rows = [row for row in rows if is_closed[row]]
            ids = [job.completion_ids[row] for row in rows]
            seen = replace(job, completions=[answers[row] for row in rows], completion_ids=ids)
            return cls(seen, rows, num_rows, math.nan if unclosed == "missing" else float(unclosed))
        return cls(job, rows, num_rows)

    @property
    def excluded_rows(self) -> set[int]:
        """The rows that get no reward of any function."""
        return set(range(self.num_rows)) - set(self.rows) if math.isnan(self.default_reward) else set()

    def scattered(self, scores: Scores) -> Scores:
        """The scores of the job, as scores of the whole group."""
        if len(self.rows) == self.num_rows or scores.rewards is None:
            return scores
        rewards = [self.default_reward] * self.num_rows
        for row, reward in zip(self.rows, scores.rewards, strict=True):
            rewards[row] = reward
        return Scores(rewards, failed={self.rows[index]: why for index, why in scores.failed.items()})
