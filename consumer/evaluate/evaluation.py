"""An evaluation of one policy version: which held-out prompts are leased, and the scores of their answers.

Guarantee: every prompt is answered once or failed once, and the first answer of the evaluated version wins. A prompt that
failed, or has too few scored completions, has no score; it is counted, and the mean leaves it out.

An evaluation knows nothing of training. It shares `PromptTable` with the ledger, and its lease ids are of another form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumer.evaluate.kept_answers import MAX_BYTES, KeptAnswer
from consumer.evaluate.results import DueVersion
from replay.advantages import weighted_sums
from replay.groups import RolloutGroup
from replay.lease_ids import EvaluationLeaseId, UnknownLeaseError
from replay.prompt_table import FailureClass, LeaseRecord, PromptTable, PromptTask, RetryBudget
from replay.sources import Sources


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k samples passes (Chen et al., 2021, arXiv:2107.03374):
    1 - C(n - c, k) / C(n, k), as the product of 1 - k / i over i = n - c + 1 .. n.
    """
    if num_samples - num_passed < k:
        return 1.0
    left = np.arange(num_samples - num_passed + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / left))


@dataclass(frozen=True)
class Metric:
    """The function that scores an answer."""

    weights: NDArray[np.float32]  # (F,); a metric that is one of the functions has weight 1 there and 0 elsewhere
    threshold: float | None = (
        None  # None: the mean worth of the completions; else pass@k of those worth at least so much
    )
    k: int = 1

    def score(self, rewards: NDArray[np.float32]) -> float | None:
        """Score rewards (n, F), NaN for missing. Return None when too few completions are scored: none, or fewer than k."""
        used = self.weights != 0
        totals = weighted_sums(rewards[:, used], self.weights[used])
        totals = totals[~np.isnan(totals)]
        if self.threshold is None:
            return float(totals.mean()) if len(totals) else None
        if len(totals) < self.k:
            return None
        return pass_at_k(len(totals), int((totals >= self.threshold).sum()), self.k)


@dataclass(frozen=True)
class Answer:
    """A prompt that is done. None and empty where it failed."""

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


@dataclass(eq=False)
class Evaluation:
    """The evaluation of a version that is due. It takes from its first lease to its last answer, and keeps what was answered,
    within bounds. Times are of the caller's clock, in seconds; `session` is unique per trainer process; `without` names the
    environments whose prompts are not among those that are `asked`."""

    due: DueVersion
    asked: Sequence[int]
    budgets: Mapping[FailureClass, RetryBudget]
    session: str
    without: tuple[str, ...] = ()
    began: float | None = None
    duration_s: float = 0.0
    _answers: dict[int, Answer] = field(default_factory=dict)
    _frames: dict[int, bytes] = field(default_factory=dict)
    _num_bytes: int = 0
    _num_leased: int = 0  # prompts that were leased at least once, the first ones

    def __post_init__(self) -> None:
        self.leases: PromptTable[int] = PromptTable(self.budgets)

    @property
    def version(self) -> int:
        """The policy version that is evaluated."""
        return self.due.policy.version

    @property
    def num_prompts(self) -> int:
        return len(self.asked)

    @property
    def num_done(self) -> int:
        return len(self._answers)

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_prompts

    def answers(self) -> list[Answer]:
        """Return the answers of the prompts that are done, in their order."""
        return [self._answers[prompt_id] for prompt_id in sorted(self._answers)]

    def kept(self) -> list[KeptAnswer]:
        """Return the kept answers of the prompts that are done, in their order; without frames where there was no room."""
        return [
            KeptAnswer(prompt_id, answer.score, self._frames.get(prompt_id, b""))
            for prompt_id, answer in sorted(self._answers.items())
        ]

    def next_task(self, now: float) -> PromptTask[int] | None:
        """The prompt that is leased next; None when none is due."""
        fresh = PromptTask(self.asked[self._num_leased]) if self._num_leased < self.num_prompts else None
        return self.leases.next_waiting(now, 0) or fresh

    def lease(self, task: PromptTask[int], producer: str, *, deadline: float) -> LeaseRecord[int]:
        """Lease what `next_task` named."""
        self._num_leased += self._num_leased < self.num_prompts and task.key == self.asked[self._num_leased]
        task = replace(task, attempt=task.attempt + 1)
        lease_id = str(EvaluationLeaseId(self.version, task.key, task.attempt, self.session))
        return self.leases.lease(LeaseRecord(lease_id, task, producer, self.version, deadline))

    def awaits(self, lease_id: str) -> int | None:
        """The prompt that an answer to this lease would settle; None if it is settled, or the lease is of another evaluation."""
        try:
            lease = EvaluationLeaseId.parse(lease_id)
        except UnknownLeaseError:
            return None
        is_ours = (lease.version, lease.session) == (self.version, self.session)
        is_given = 1 <= lease.attempt <= self.leases.task(lease.prompt_id).attempt
        return lease.prompt_id if is_ours and is_given and self.leases.is_open(lease.prompt_id) else None

    def answer(self, prompt_id: int, answer: Answer, frame: bytes = b"") -> None:
        """Settle the prompt that `awaits` named, and keep the message of its answer while there is room."""
        self._answers[prompt_id] = answer
        if self._num_bytes + len(frame) <= MAX_BYTES:
            self._num_bytes += len(frame)
            self._frames[prompt_id] = frame
        self.leases.remove(prompt_id)
        lease = self.leases.lease_on(prompt_id)
        if lease is not None:
            self.leases.end_lease(lease.lease_id)

    def fail(self, lease_id: str, reason: str, now: float) -> bool | None:
        """The lease ended without an answer. Returns as `PromptTable.fail`; a prompt whose budget is spent is settled."""

        def give_up(task: PromptTask[int]) -> None:
            self._answers[task.key] = Answer()

        return self.leases.fail(lease_id, reason, now, give_up)


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


def by_source(answers: list[KeptAnswer], sources: Sources) -> dict[str, Any]:
    """Return the score of each source, and the mean of these scores, in which a source counts like any other. Nothing, where
    there are not several sources."""
    found = {}
    for name in sources.names:
        own = [answer.score for answer in answers if sources.name_of(answer.prompt_id) == name]
        scores = [score for score in own if score is not None]
        if own:
            score = float(np.mean(scores)) if scores else None
            found[name] = {"score": score, "num_prompts": len(own), "num_scored": len(scores)}
    known = [each["score"] for each in found.values() if each["score"] is not None]
    return {"sources": found, "mean_of_sources": float(np.mean(known)) if known else None} if found else {}


def scores_of_sources(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores by source that a result has."""
    return {name: each["score"] for name, each in result.get("sources", {}).items() if each["score"] is not None}
