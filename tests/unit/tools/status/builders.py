"""What daemons say, for tests."""

from typing import Any

from protocol.service.status import Status
from tools.run_reader import DaemonAddress
from tools.status.daemons import Answer
from tools.status.view import ProducerView, TrainerView, View

TRAINER = DaemonAddress("127.0.0.1:9100", "rl-trainer", "host-1")
PRODUCER = DaemonAddress("127.0.0.1:9200", "rl-producer", "gpu0-7-ab")

TRAINER_NUMBERS: dict[str, Any] = {
    "step": 30,
    "max_steps": 60,
    "epoch": 0,
    "policy_version": 30,
    "last_step_timestamp_seconds": 998,
    "step_seconds_count": 30,
    "step_seconds_sum": 60,
    "wait_seconds": 120,
    "waiting_seconds": 1.5,
    "tokens_trained": 9000,
    "tokens_generated": 18000,
    "reward": 0.75,
    "reward_std": 0.25,
    "reward_by_function": {"exact": 0.75},
    "zero_signal_ratio": 0.25,
    "completions_truncated_ratio": 0.125,
    "completion_length_mean_tokens": 12,
    "effective_sample_ratio": 0.875,
    "sampling_kl_nats": 0.001,
    "entropy_nats": 0.5,
    "loss": 0.2,
    "gradient_norm": 0.1,
    "nonfinite_steps": 0,
    "connections_refused": {"unknown_key": 0},
    "evaluation_score": 0.5,
    "evaluation_best_score": 0.625,
    "evaluation_version": 20,
    "evaluation_prompts": 8,
    "evaluation_prompts_done": 3,
    "evaluations": {"scored": 2},
    "staleness_mean_versions": 1.5,
    "staleness_max_versions": 2,
    "max_staleness_versions": 2,
    "producers_connected": 2,
    "leases_out": 42,
    "groups_ready": 6,
    "groups_replayable": 3,
    "rerolls_waiting": 1,
    "groups_received": {"accepted": 486, "no_signal": 20, "stale": 0},
    "leases_failed": {"expired": 4, "bad_prompt": 0},
    "groups_trained": 480,
    "groups_went_stale": 0,
    "groups_quarantined": 0,
    "dead_letters": 2,
    "frames_refused": 0,
    "journal_bytes": 4194304,
    "journal_commit_seconds_count": 500,
    "journal_commit_seconds_sum": 2,
    "disk_used_ratio": 0.25,
    "disk_used_limit_ratio": 0.95,
    "producer_policy_version": {"gpu0-7-ab": 29, "far-9-cd": -1},
    "producer_lag_versions": {"gpu0-7-ab": 1, "far-9-cd": 31},
    "producer_leases": {"gpu0-7-ab": 22, "far-9-cd": 20},
    "producer_heard_seconds": {"gpu0-7-ab": 0.5, "far-9-cd": 0.25},
    "producer_refused_version": {"gpu0-7-ab": -1, "far-9-cd": 7},
}
PRODUCER_NUMBERS: dict[str, Any] = {
    "connected": 1,
    "paused": 0,
    "policy_version": 29,
    "leases": {"waiting": 1, "generating": 20, "scoring": 0, "unacked": 1},
    "busy_seconds": 90,
    "idle_seconds": 10,
    "completion_tokens": 20000,
    "swaps": {"live": 30, "refused": 0},
    "swap_seconds_count": 30,
    "swap_seconds_sum": 6,
}
_INFO = {
    "rl-trainer": {"run": "ab12", "release": "0.1.0"},
    "rl-producer": {"producer": "gpu0-7-ab", "release": "0.1.0"},
}


def answer(
    source: DaemonAddress = TRAINER,
    *,
    at: float = 1000.0,
    started: float = 800.0,
    not_ready: dict[str, str] | None = None,
    numbers: dict[str, Any] | None = None,
    **others: float,
) -> Answer:
    """What a daemon says: `numbers`, or those above with `others` in place of some."""
    job = source.job or "rl-trainer"
    usual = TRAINER_NUMBERS if job == "rl-trainer" else PRODUCER_NUMBERS
    assert others.keys() <= usual.keys()
    status = Status(
        job=job,
        daemon=source.daemon or "",
        at=at,
        started=started,
        not_ready=not_ready or {},
        info=_INFO[job],
        numbers=usual | others if numbers is None else numbers,
    )
    return Answer(source, at, status)


def seen(trainer: dict[str, Any] | None = None, *producers: ProducerView, **fields: Any) -> View:
    """A view with a trainer of these numbers."""
    shown = None if trainer is None else TrainerView(**{"address": "h:1", "daemon": "t"} | trainer)
    return View(**{"at": 1000.0, "trainer": shown, "producers": list(producers), "rewards": {}, "silent": {}} | fields)


def producer(**fields: Any) -> ProducerView:
    return ProducerView(**{"name": "p1", "address": "h:2"} | fields)
