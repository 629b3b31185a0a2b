"""What one reward function sees of a group, and what its answer says of the whole group.

Guarantee: a function that shall not see reasoning never does, and a completion whose reasoning does not end gets what
`rewards.thinking.unclosed` says.
"""

import math
from dataclasses import dataclass

from producer.rewards.thinking import Reasoning
from producer.rewards.worker import Job, Scores
from protocol.config.rewards import RewardFunction, RewardsSection


@dataclass(frozen=True)
class View:
    """Args:
    job: what the function is given.
    rows: of the group, that the job has.
    others: reward of the other rows; NaN: they are left out.
    """

    job: Job
    rows: list[int]
    others: float = math.nan

    @classmethod
    def of(cls, section: RewardsSection, function: RewardFunction, job: Job, reasoning: Reasoning | None) -> "View":
        rows = list(range(len(job.completions)))
        if reasoning is None:
            return cls(job, rows)
        if function.counts_reasoning:
            return cls(Job(job.prompt, job.completions, job.completion_ids, job.columns, reasoning.num_tokens), rows)
        if not section.strips(function):
            return cls(job, rows)
        unclosed = section.thinking.unclosed
        if unclosed == "as_is":
            shown = [
                answer if closed else whole
                for answer, closed, whole in zip(reasoning.answers, reasoning.is_closed, job.completions, strict=True)
            ]
            return cls(Job(job.prompt, shown, job.completion_ids, job.columns), rows)
        rows = [row for row in rows if reasoning.is_closed[row]]
        seen = Job(
            job.prompt, [reasoning.answers[row] for row in rows], [job.completion_ids[row] for row in rows], job.columns
        )
        return cls(seen, rows, math.nan if unclosed == "missing" else float(unclosed))

    def left_out(self, num_rows: int) -> set[int]:
        """Rows that nothing shall be said about."""
        return set(range(num_rows)) - set(self.rows) if math.isnan(self.others) else set()

    def widened(self, scores: Scores, num_rows: int) -> Scores:
        """Of the whole group, from those of the job."""
        if len(self.rows) == num_rows or scores.rewards is None:
            return scores
        rewards = [self.others] * num_rows
        for row, reward in zip(self.rows, scores.rewards, strict=True):
            rewards[row] = reward
        return Scores(rewards, failed={self.rows[index]: why for index, why in scores.failed.items()})
