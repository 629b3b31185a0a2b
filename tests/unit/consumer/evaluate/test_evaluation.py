"""Scores worked by hand, and the leases of an evaluation under any sequence of events."""

import itertools

import numpy as np
import pytest

from consumer.evaluate.evaluation import Answer, Evaluation, Metric, pass_at_k, summary
from consumer.evaluate.results import DueVersion
from protocol.wire.messages import PolicyInfo
from replay.lease_ids import LeaseId, UnknownLeaseError, is_evaluation
from replay.prompt_table import LeaseRecord, PromptTask, RetryBudget

NAN = float("nan")
BUDGETS = {"data": RetryBudget(2, 1.0), "infra": RetryBudget(3, 0.5)}


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 0, 1, 0.0),
        (5, 2, 1, 2 / 5),
        (4, 1, 2, 1 / 2),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (5, 2, 3, 9 / 10),  # 1 - C(3, 3) / C(5, 3) = 1 - 1 / 10
        (10, 3, 5, 11 / 12),  # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
        (5, 3, 3, 1.0),  # two failures cannot fill three places
        (5, 5, 5, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    for n, c, k in [(6, 2, 3), (7, 1, 4), (8, 3, 2)]:
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(4000, 1, 2000) == pytest.approx(0.5), "no binomial overflows"


@pytest.mark.parametrize(
    ("weights", "threshold", "k", "rewards", "expected"),
    [
        ([1.0, 0.5], None, 1, [[1.0, 2.0], [0.0, 0.0]], 1.0),  # totals 2 and 0
        ([1.0, 0.5], None, 1, [[1.0, NAN], [NAN, NAN]], 1.0),  # a missing one is left out, an unscored completion too
        ([0.0, 1.0], None, 1, [[1.0, 0.25], [1.0, NAN]], 0.25),  # one function alone
        ([1.0, 1.0], None, 1, [[NAN, NAN]], None),
        ([1.0], 0.5, 1, [[0.5], [0.4], [1.0], [0.0]], 0.5),
        ([1.0], 0.5, 2, [[0.5], [0.4], [0.0], [NAN]], 2 / 3),  # of three: 1 - C(2, 2) / C(3, 2)
        ([1.0], 0.5, 2, [[0.5], [NAN]], None),  # one sample says nothing about two
    ],
)
def test_what_an_answer_is_worth(
    weights: list[float], threshold: float | None, k: int, rewards: list[list[float]], expected: float | None
) -> None:
    score = Metric(np.array(weights, np.float32), threshold, k).score(np.array(rewards, np.float32))
    assert score == (expected if expected is None else pytest.approx(expected))


def test_the_numbers_of_an_evaluation() -> None:
    answers = [Answer(1.0, (1.0, NAN), (3, 5), 1), Answer(0.0, (0.5, 4.0), (4, 4), 0), Answer()]
    assert summary(answers, ("first", "second")) == {
        "score": 0.5,
        "num_prompts": 3,
        "num_scored": 2,
        "rewards": {"first": 0.75, "second": 4.0},
        "mean_length": 4.0,
        "truncated_share": 0.25,
    }
    assert summary([Answer()], ("first",)) == {
        "score": None, "num_prompts": 1, "num_scored": 0, "rewards": {}, "mean_length": None, "truncated_share": None,
    }  # fmt: skip


def evaluation_of(num_prompts: int) -> Evaluation:
    """Of version 4."""
    return Evaluation(DueVersion(PolicyInfo(4, "0" * 64, 1), 40, b""), range(num_prompts), BUDGETS, "s")


def lease(evaluation: Evaluation, now: float, producer: str = "p", deadline: float = 99.0) -> LeaseRecord:
    task = evaluation.next_task(now)
    assert task is not None
    return evaluation.lease(task, producer, deadline=deadline)


def test_a_lease_id_is_none_of_the_ledger_s() -> None:
    record = lease(evaluation_of(2), 0.0, deadline=9.0)
    assert record == LeaseRecord("evaluation-4-0-1-s", PromptTask(0, attempt=1), "p", 4, 9.0)
    assert is_evaluation(record.lease_id)
    assert not is_evaluation("0-4-0-1-s")
    with pytest.raises(UnknownLeaseError):
        LeaseId.parse(record.lease_id)


def answers(evaluation: Evaluation, lease_id: str, answer: Answer) -> bool:
    """Whether the answer is wanted."""
    prompt_id = evaluation.awaits(lease_id)
    if prompt_id is not None:
        evaluation.answer(prompt_id, answer)
    return prompt_id is not None


def test_a_prompt_waits_after_a_failure_and_is_given_up_within_its_budget() -> None:
    evaluation = evaluation_of(1)

    assert evaluation.fail(lease(evaluation, 0.0).lease_id, "expired", 1.0) is True
    assert evaluation.next_task(1.4) is None
    assert evaluation.fail(lease(evaluation, 1.5).lease_id, "reward_failed", 2.0) is True, (
        "another class, another budget"
    )
    evaluation.leases.give_back(lease(evaluation, 3.0).lease_id)
    assert evaluation.fail(again := lease(evaluation, 3.0).lease_id, "reward_failed", 4.0) is False
    assert evaluation.fail(again, "reward_failed", 4.0) is None
    assert evaluation.is_done
    assert evaluation.answers() == [Answer()]
    assert not answers(evaluation, again, Answer(1.0)), "too late"


def test_a_late_answer_counts_and_one_of_another_process_or_version_does_not() -> None:
    evaluation = evaluation_of(2)
    late = lease(evaluation, 0.0).lease_id
    evaluation.fail(late, "expired", 1.0)
    out = lease(evaluation, 2.0, "q").lease_id
    for other in (
        "evaluation-4-0-1-r",
        "evaluation-3-0-1-s",
        "evaluation-4-7-1-s",
        "evaluation-4-0-3-s",
        "evaluation-x-s",
    ):
        assert not answers(evaluation, other, Answer(0.0)), other
    assert answers(evaluation, late, Answer(1.0))
    assert not answers(evaluation, out, Answer(0.0)), "the first one won"
    assert evaluation.leases.leases_of("q") == []
    assert evaluation.num_done == 1
