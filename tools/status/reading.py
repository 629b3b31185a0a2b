"""From what the daemons said to the numbers of the view.

Guarantee: pure; a number that nobody shows is None; every name of a metric of ours stands in this module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.status.rates import Rates, newest_mean
from tools.status.scrape import Answer
from tools.status.view import ProducerView, TrainerView, View

_TRAINER_CLOCK = ("rl_trainer_wait_seconds_total", "rl_trainer_step_seconds_sum")
_PRODUCER_CLOCK = ("rl_producer_idle_seconds_total", "rl_producer_busy_seconds_total")

_FIRST_STEPS, _LATE_S, _LATE_PACES = 3, 10.0, 5.0

_COUNTS = {
    "step": "rl_trainer_step",
    "max_steps": "rl_trainer_max_steps",
    "epoch": "rl_trainer_epoch",
    "policy_version": "rl_trainer_policy_version",
    "max_staleness": "rl_trainer_max_staleness_versions",
    "staleness_max": "rl_trainer_staleness_max_versions",
    "producers_connected": "rl_trainer_producers_connected",
    "leases_out": "rl_trainer_leases_out",
    "groups_ready": "rl_trainer_groups_ready",
    "groups_replayable": "rl_trainer_groups_replayable",
    "rerolls_waiting": "rl_trainer_rerolls_waiting",
    "groups_trained": "rl_trainer_groups_trained_total",
    "groups_went_stale": "rl_trainer_groups_went_stale_total",
    "groups_quarantined": "rl_trainer_groups_quarantined_total",
    "dead_letters": "rl_trainer_dead_letters_total",
    "frames_refused": "rl_trainer_frames_refused_total",
    "nonfinite_steps": "rl_trainer_nonfinite_steps_total",
    "journal_bytes": "rl_trainer_journal_bytes",
    "evaluation_version": "rl_trainer_evaluation_version",
    "evaluation_prompts": "rl_trainer_evaluation_prompts",
    "evaluation_prompts_done": "rl_trainer_evaluation_prompts_done",
}
_NUMBERS = {
    "waiting_now_s": "rl_trainer_waiting_seconds",
    "reward": "rl_trainer_reward",
    "reward_std": "rl_trainer_reward_std",
    "zero_signal_share": "rl_trainer_zero_signal_ratio",
    "truncated_share": "rl_trainer_completions_truncated_ratio",
    "completion_length_mean": "rl_trainer_completion_length_mean_tokens",
    "staleness_mean": "rl_trainer_staleness_mean_versions",
    "effective_sample_share": "rl_trainer_effective_sample_ratio",
    "sampling_kl": "rl_trainer_sampling_kl_nats",
    "entropy": "rl_trainer_entropy_nats",
    "loss": "rl_trainer_loss",
    "gradient_norm": "rl_trainer_gradient_norm",
    "disk_used_share": "rl_trainer_disk_used_ratio",
    "disk_limit_share": "rl_trainer_disk_used_limit_ratio",
    "evaluation_score": "rl_trainer_evaluation_score",
    "evaluation_best_score": "rl_trainer_evaluation_best_score",
}


def read(looks: Sequence[Sequence[Answer]], rewards: Mapping[int, float]) -> View:
    """
    Args:
        looks: what all daemons said at each of the last looks, oldest first.
        rewards: of the last steps, as far as they are known.
    """
    newest = looks[-1]
    trainers = [answer for answer in newest if answer.job == "rl-trainer"]
    trainer = min(trainers, key=lambda answer: answer.error is not None, default=None)
    producers = {
        producer.name: producer
        for producer in (_producer(_of(looks, answer), trainer) for answer in newest if answer.job == "rl-producer")
    }
    for name in trainer.by("rl_trainer_producer_policy_version", "producer") if trainer else ():
        if name not in producers:
            producers[name] = ProducerView(name, connected=True, **_known_to(trainer, name))
    return View(
        at=max((answer.at for answer in newest), default=0.0),
        trainer=None if trainer is None else _trainer(_of(looks, trainer)),
        producers=[producers[name] for name in sorted(producers)],
        rewards=dict(rewards),
        silent={answer.source.address: answer.error or "" for answer in newest if answer.job is None},
    )


def _of(looks: Sequence[Sequence[Answer]], daemon: Answer) -> list[Answer]:
    """All that this one said."""
    return [answer for answers in looks for answer in answers if answer.source == daemon.source]


def _trainer(answers: list[Answer]) -> TrainerView:
    now = answers[-1]
    if now.error is not None:
        return TrainerView(now.source.address, now.source.daemon, now.error, {})
    rates = Rates(answers, _TRAINER_CLOCK)
    counts = {key: _whole(now.value(name)) for key, name in _COUNTS.items()}
    numbers = {key: now.value(name) for key, name in _NUMBERS.items()}
    pace_s = rates.clock_per("rl_trainer_step_seconds_count")
    last_step = now.value("rl_trainer_last_step_timestamp_seconds")
    since_s = max(0.0, now.at - last_step) if last_step else None
    return TrainerView(
        now.source.address,
        now.source.daemon,
        None,
        _not_ready(now),
        run=now.told("rl_trainer_info", "run"),
        release=now.told("rl_trainer_info", "release"),
        rates_over_s=rates.over_s,
        rates_since_start=rates.since_start,
        since_last_step_s=since_s,
        step_pace_s=pace_s,
        eta_s=_eta_s(counts["step"], counts["max_steps"], pace_s, since_s),
        wait_share=rates.share("rl_trainer_wait_seconds_total"),
        tokens_generated_per_s=rates.per_second("rl_trainer_tokens_generated_total"),
        tokens_trained_per_s=rates.per_second("rl_trainer_tokens_trained_total"),
        rewards_by_function=now.by("rl_trainer_reward_by_function", "function"),
        groups_received=_wholes(now.by("rl_trainer_groups_received_total", "outcome")),
        leases_failed=_wholes(now.by("rl_trainer_leases_failed_total", "reason")),
        connections_refused=_wholes(now.by("rl_trainer_connections_refused_total", "reason")),
        evaluations=_wholes(now.by("rl_trainer_evaluations_total", "outcome")),
        journal_commit_s=rates.mean("rl_trainer_journal_commit_seconds"),
        **counts,
        **numbers,  # type: ignore[arg-type]
    )


def _eta_s(step: int | None, max_steps: int | None, pace_s: float | None, since_s: float | None) -> float | None:
    """At the pace of now; none after the first two steps, and none while steps are late."""
    if step is None or max_steps is None or pace_s is None or since_s is None:
        return None
    late = since_s > max(_LATE_S, _LATE_PACES * pace_s)
    return None if late or step < _FIRST_STEPS else max(0, max_steps - step) * pace_s


def _producer(answers: list[Answer], trainer: Answer | None) -> ProducerView:
    now = answers[-1]
    name = now.told("rl_producer_info", "producer") or now.source.daemon or now.source.address
    known = _known_to(trainer, name)
    if now.error is not None:
        return ProducerView(name, now.source.address, now.error, **known)
    rates = Rates(answers, _PRODUCER_CLOCK)
    connected = now.value("rl_producer_connected")
    version = _whole(now.value("rl_producer_policy_version"))
    newest = _whole(trainer.value("rl_trainer_policy_version")) if trainer else None
    known |= {
        "policy_version": version,
        "lag": None if newest is None or version is None or version < 0 else max(0, newest - version),
        "leases": _wholes(now.by("rl_producer_leases", "stage")),
    }
    return ProducerView(
        name,
        now.source.address,
        None,
        _not_ready(now),
        release=now.told("rl_producer_info", "release"),
        rates_over_s=rates.over_s,
        rates_since_start=rates.since_start,
        connected=None if connected is None else bool(connected),
        paused=bool(now.value("rl_producer_paused")),
        idle_share=rates.share("rl_producer_idle_seconds_total"),
        tokens_per_s=rates.per_second("rl_producer_completion_tokens_total"),
        swaps=_wholes(now.by("rl_producer_swaps_total", "outcome")),
        swap_mean_s=rates.mean("rl_producer_swap_seconds"),
        swap_last_s=newest_mean(answers, "rl_producer_swap_seconds"),
        **known,
    )


def _known_to(trainer: Answer | None, producer: str) -> dict[str, Any]:
    """What the trainer says of it; nothing if it is not connected."""
    version = _whole(trainer.value("rl_trainer_producer_policy_version", producer=producer)) if trainer else None
    if trainer is None or version is None:
        return {}
    lag = trainer.value("rl_trainer_producer_lag_versions", producer=producer)
    return {
        "policy_version": version,
        "lag": None if version < 0 else _whole(lag),
        "refused_version": _whole(trainer.value("rl_trainer_producer_refused_version", producer=producer)),
        "heard_s": trainer.value("rl_trainer_producer_heard_seconds", producer=producer),
        "leases": {"held": _whole(trainer.value("rl_trainer_producer_leases", producer=producer)) or 0},
    }


def _not_ready(answer: Answer) -> dict[str, str]:
    return {name: why for name, why in answer.checks.items() if why != "ok"}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _wholes(values: Mapping[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items()}
