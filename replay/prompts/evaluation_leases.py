"""One evaluation: which held-out prompts are out, and what their answers are worth.

Guarantee: every prompt is answered once or given up once; the first answer of the evaluated version wins, and a lease that
ends without one goes out again within the budgets of its failures. A prompt that was given up, or of which too few
completions were scored, has no score; it is counted and is no part of the mean.

It knows nothing of training: its lease ids begin with `evaluation-`, which no ledger gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.groups import RolloutGroup
from replay.prompts.failure_budgets import FailureClass, RetryBudget, failure_class, is_hopeless

_PREFIX = "evaluation-"


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k samples passes (Chen et al., 2021, arXiv:2107.03374):
    1 - C(n - c, k) / C(n, k), as the product of 1 - k / i over i = n - c + 1 .. n.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} in {num_samples} samples")
    if num_samples - num_passed < k:
        return 1.0
    left = np.arange(num_samples - num_passed + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / left))


@dataclass(frozen=True)
class Metric:
    """What an answer is worth.

    Args:
        weights: float32 (F,), of the reward functions; a metric that is one of them has weight 1 there and 0 elsewhere.
        threshold: None: the mean worth of the completions; else pass@k of those worth at least so much.
    """

    weights: NDArray[np.float32]
    threshold: float | None = None
    k: int = 1

    def score(self, rewards: NDArray[np.float32]) -> float | None:
        """
        Args:
            rewards: (n, F), NaN for missing.

        Returns:
            None when too few completions are scored: none, or fewer than k.
        """
        missing = np.isnan(rewards) | (self.weights == 0)
        totals = np.where(missing, 0.0, rewards).astype(np.float64) @ self.weights
        totals = totals[~missing.all(axis=1)]
        if self.threshold is None:
            return float(totals.mean()) if len(totals) else None
        if len(totals) < self.k:
            return None
        return pass_at_k(len(totals), int((totals >= self.threshold).sum()), self.k)


@dataclass(frozen=True)
class Answer:
    """A prompt that is done. None and empty where it was given up."""

    score: float | None = None
    rewards: tuple[float, ...] = ()  # mean by function, NaN where none is scored
    lengths: tuple[int, ...] = ()  # of the completions, in tokens that the policy sampled
    num_truncated: int = 0

    @classmethod
    def of(cls, group: RolloutGroup, metric: Metric) -> "Answer":
        scored = ~np.isnan(group.rewards)
        sums = np.where(scored, group.rewards, 0.0).astype(np.float64).sum(axis=0)
        counts = scored.sum(axis=0)
        means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        lengths = tuple(group.sampled_lengths.tolist())
        return cls(metric.score(group.rewards), tuple(means.tolist()), lengths, int(group.was_truncated.sum()))


def is_evaluation(lease_id: str) -> bool:
    """Whether the lease is one of an evaluation's, of this process or another."""
    return lease_id.startswith(_PREFIX)


@dataclass
class _Prompt:
    attempt: int = 0
    failures: dict[FailureClass, int] = field(default_factory=lambda: {"data": 0, "infra": 0})
    not_before: float = 0.0
    lease_id: str | None = None  # the one that is out
    answer: Answer | None = None


@dataclass(frozen=True)
class _Out:
    prompt_id: int
    producer: str
    deadline: float


class Evaluation:
    """See the module's guarantee. Times are of the caller's clock, in seconds.

    Args:
        version: the policy that is evaluated.
        session: part of every lease id, unique per trainer process.
    """

    def __init__(
        self, version: int, num_prompts: int, budgets: Mapping[FailureClass, RetryBudget], session: str
    ) -> None:
        self.version = version
        self._budgets = budgets
        self._session = session
        self._prompts = [_Prompt() for _ in range(num_prompts)]
        self._unanswered = dict.fromkeys(range(num_prompts))  # in the order in which they are asked
        self._out: dict[str, _Out] = {}

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_done(self) -> int:
        return len(self._prompts) - len(self._unanswered)

    @property
    def num_out(self) -> int:
        return len(self._out)

    @property
    def is_done(self) -> bool:
        return not self._unanswered

    def answers(self) -> list[Answer]:
        """Of the prompts that are done, in their order."""
        return [prompt.answer for prompt in self._prompts if prompt.answer is not None]

    def next_prompt(self, now: float) -> int | None:
        """The one that `lease` would give; None when none is due."""
        waiting = ((prompt_id, self._prompts[prompt_id]) for prompt_id in self._unanswered)
        return next((i for i, prompt in waiting if prompt.lease_id is None and prompt.not_before <= now), None)

    def lease(self, producer: str, *, now: float, deadline: float) -> tuple[str, int, int] | None:
        """Gives the next prompt to `producer`: lease id, prompt id and attempt; None when none is due."""
        prompt_id = self.next_prompt(now)
        if prompt_id is None:
            return None
        prompt = self._prompts[prompt_id]
        prompt.attempt += 1
        lease_id = f"{_PREFIX}{self.version}-{prompt_id}-{prompt.attempt}-{self._session}"
        prompt.lease_id = lease_id
        self._out[lease_id] = _Out(prompt_id, producer, deadline)
        return lease_id, prompt_id, prompt.attempt

    def awaits(self, lease_id: str) -> bool:
        """Whether an answer to this lease would count: not if its prompt is done, or it is of another evaluation."""
        return self._prompt_of(lease_id) in self._unanswered

    def answer(self, lease_id: str, answer: Answer) -> bool:
        """Returns whether it counts."""
        prompt_id = self._prompt_of(lease_id)
        if prompt_id is None or prompt_id not in self._unanswered:
            return False
        self._settle(prompt_id, answer)
        return True

    def fail(self, lease_id: str, reason: str, now: float) -> bool | None:
        """The lease ended without an answer. True if the prompt goes out again, False if it is given up, None if it makes no
        difference."""
        out = self._out.pop(lease_id, None)
        if out is None:
            return None
        prompt = self._prompts[out.prompt_id]
        prompt.lease_id = None
        of = failure_class(reason)
        prompt.failures[of] += 1
        if is_hopeless(reason) or prompt.failures[of] >= self._budgets[of].max_attempts:
            self._settle(out.prompt_id, Answer())
            return False
        prompt.not_before = now + self._budgets[of].delay_s(prompt.failures[of])
        return True

    def give_back(self, lease_id: str) -> None:
        """The producer hands the lease back: no failure is counted, and the prompt goes out again at once."""
        out = self._out.pop(lease_id, None)
        if out is not None:
            self._prompts[out.prompt_id].lease_id = None

    def overdue(self, now: float) -> list[str]:
        return [lease_id for lease_id, out in self._out.items() if out.deadline <= now]

    def leases_of(self, producer: str) -> list[str]:
        return [lease_id for lease_id, out in self._out.items() if out.producer == producer]

    def _prompt_of(self, lease_id: str) -> int | None:
        """Of a lease of this evaluation and process, also of one that has ended."""
        head, _, session = lease_id.removeprefix(_PREFIX).rpartition("-")
        parts = head.split("-")
        if session != self._session or len(parts) != 3 or not all(part.isdecimal() for part in parts):
            return None
        version, prompt_id, attempt = map(int, parts)
        if version != self.version or prompt_id >= len(self._prompts):
            return None
        return prompt_id if 1 <= attempt <= self._prompts[prompt_id].attempt else None

    def _settle(self, prompt_id: int, answer: Answer) -> None:
        prompt = self._prompts[prompt_id]
        prompt.answer = answer
        if prompt.lease_id is not None:
            self._out.pop(prompt.lease_id, None)
            prompt.lease_id = None
        del self._unanswered[prompt_id]


def summary(answers: list[Answer], reward_names: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of an evaluation: its score is the mean over the prompts that have one, None if none has."""
    scores = [answer.score for answer in answers if answer.score is not None]
    columns = np.array([answer.rewards for answer in answers if answer.rewards], np.float64).reshape(
        -1, len(reward_names)
    )
    lengths = [length for answer in answers for length in answer.lengths]
    rewards = {
        name: float(np.nanmean(column))
        for name, column in zip(reward_names, columns.T, strict=True)
        if not np.isnan(column).all()
    }
    return {
        "score": float(np.mean(scores)) if scores else None,
        "num_prompts": len(answers),
        "num_scored": len(scores),
        "rewards": rewards,
        "mean_length": float(np.mean(lengths)) if lengths else None,
        "truncated_share": sum(answer.num_truncated for answer in answers) / len(lengths) if lengths else None,
    }
