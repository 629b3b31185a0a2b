"""Evaluations as Prometheus metrics.

Guarantee: the numbers are those of `EvaluationControl` at the moment of the scrape; they are NaN or 0 in a run without
evaluations, and NaN before the first result of this process.
"""

import math
from typing import Any

from prometheus_client import CollectorRegistry

from consumer.evaluation.control import EvaluationControl
from consumer.evaluation.leases import Progress
from protocol.service.metrics import Readings


def watch_evaluation(registry: CollectorRegistry, evaluation: EvaluationControl | None) -> None:
    """
    Args:
        evaluation: None for a run without.
    """

    def last(key: str) -> float:
        result: dict[str, Any] = (evaluation and evaluation.last) or {}
        value = result.get(key)
        return math.nan if value is None else float(value)

    def best() -> float:
        score = evaluation.best_score if evaluation else None
        return math.nan if score is None else score

    def progress() -> Progress:
        return evaluation.leases.progress if evaluation else Progress()

    readings = Readings(registry)
    readings.gauge("rl_trainer_evaluation_score", "Score of the last evaluation.", lambda: last("score"))
    readings.gauge("rl_trainer_evaluation_best_score", "Best score of the run.", best)
    readings.gauge("rl_trainer_evaluation_version", "Policy version of the last evaluation.", lambda: last("version"))
    readings.gauge(
        "rl_trainer_evaluation_duration_seconds",
        "Time from the first lease of the last evaluation to its last answer.",
        lambda: last("duration_s"),
    )
    readings.gauge(
        "rl_trainer_evaluation_completion_length_mean_tokens",
        "Mean length of the completions of the last evaluation.",
        lambda: last("mean_length"),
    )
    readings.gauge(
        "rl_trainer_evaluation_without_improvement",
        "Evaluations since the last improvement, which evaluation.patience bounds.",
        lambda: evaluation.num_without_improvement if evaluation else 0,
    )
    readings.gauge(
        "rl_trainer_evaluation_prompts",
        "Prompts of the evaluation in progress; 0 while there is none.",
        lambda: progress().num_prompts,
    )
    readings.gauge(
        "rl_trainer_evaluation_prompts_done",
        "Those of them that are answered or given up.",
        lambda: progress().num_done,
    )
    readings.gauge("rl_trainer_evaluation_leases", "Leases of the evaluation in progress.", lambda: progress().num_out)
    readings.counters(
        "rl_trainer_evaluations_total",
        "Evaluations since the trainer started: scored, incomplete (too few prompts have a score to count), or skipped because "
        "the one before took too long.",
        "outcome",
        lambda: {
            "scored": evaluation.totals["scored"] if evaluation else 0,
            "incomplete": evaluation.totals["incomplete"] if evaluation else 0,
            "skipped": evaluation.num_skipped if evaluation else 0,
        },
    )
