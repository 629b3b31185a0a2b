"""What daemons say, for tests."""

from typing import Any

from tools.status.scrape import Answer, parse
from tools.status.sources import Source
from tools.status.view import ProducerView, TrainerView, View

TRAINER = Source("127.0.0.1:9100", "rl-trainer", "host-1")
PRODUCER = Source("127.0.0.1:9200", "rl-producer", "gpu0-7-ab")

TRAINER_TEXT = """\
rl_trainer_info{run="ab12",release="0.1.0"} 1
rl_trainer_step 30
rl_trainer_max_steps 60
rl_trainer_epoch 0
rl_trainer_policy_version 30
rl_trainer_last_step_timestamp_seconds 998
rl_trainer_step_seconds_count 30
rl_trainer_step_seconds_sum 60
rl_trainer_wait_seconds_total 120
rl_trainer_waiting_seconds 1.5
rl_trainer_tokens_trained_total 9000
rl_trainer_tokens_generated_total 18000
rl_trainer_reward 0.75
rl_trainer_reward_std 0.25
rl_trainer_reward_by_function{function="exact"} 0.75
rl_trainer_zero_signal_ratio 0.25
rl_trainer_completions_truncated_ratio 0.125
rl_trainer_completion_length_mean_tokens 12
rl_trainer_effective_sample_ratio 0.875
rl_trainer_sampling_kl_nats 0.001
rl_trainer_entropy_nats 0.5
rl_trainer_loss NaN
rl_trainer_gradient_norm 0.1
rl_trainer_nonfinite_steps_total 0
rl_trainer_staleness_mean_versions 1.5
rl_trainer_staleness_max_versions 2
rl_trainer_max_staleness_versions 2
rl_trainer_producers_connected 2
rl_trainer_leases_out 42
rl_trainer_groups_ready 6
rl_trainer_groups_replayable 3
rl_trainer_rerolls_waiting 1
rl_trainer_groups_received_total{outcome="accepted"} 486
rl_trainer_groups_received_total{outcome="no_signal"} 20
rl_trainer_groups_received_total{outcome="stale"} 0
rl_trainer_leases_failed_total{reason="expired"} 4
rl_trainer_leases_failed_total{reason="bad_prompt"} 0
rl_trainer_groups_trained_total 480
rl_trainer_groups_went_stale_total 0
rl_trainer_groups_quarantined_total 0
rl_trainer_dead_letters_total 2
rl_trainer_frames_refused_total 0
rl_trainer_journal_bytes 4194304
rl_trainer_journal_commit_seconds_count 500
rl_trainer_journal_commit_seconds_sum 2
rl_trainer_disk_used_ratio 0.25
rl_trainer_disk_used_limit_ratio 0.95
rl_trainer_producer_policy_version{producer="gpu0-7-ab"} 29
rl_trainer_producer_lag_versions{producer="gpu0-7-ab"} 1
rl_trainer_producer_leases{producer="gpu0-7-ab"} 22
rl_trainer_producer_heard_seconds{producer="gpu0-7-ab"} 0.5
rl_trainer_producer_refused_version{producer="gpu0-7-ab"} -1
rl_trainer_producer_policy_version{producer="far-9-cd"} -1
rl_trainer_producer_lag_versions{producer="far-9-cd"} 31
rl_trainer_producer_leases{producer="far-9-cd"} 20
rl_trainer_producer_heard_seconds{producer="far-9-cd"} 0.25
rl_trainer_producer_refused_version{producer="far-9-cd"} 7
"""

PRODUCER_TEXT = """\
rl_producer_info{producer="gpu0-7-ab",release="0.1.0"} 1
rl_producer_connected 1
rl_producer_paused 0
rl_producer_policy_version 29
rl_producer_leases{stage="waiting"} 1
rl_producer_leases{stage="generating"} 20
rl_producer_leases{stage="scoring"} 0
rl_producer_leases{stage="unacked"} 1
rl_producer_busy_seconds_total 90
rl_producer_idle_seconds_total 10
rl_producer_completion_tokens_total 20000
rl_producer_swaps_total{outcome="live"} 30
rl_producer_swaps_total{outcome="refused"} 0
rl_producer_swap_seconds_count 30
rl_producer_swap_seconds_sum 6
"""


def answer(
    text: str,
    source: Source = TRAINER,
    *,
    at: float = 1000.0,
    start: float = 800.0,
    checks: dict[str, str] | None = None,
) -> Answer:
    return Answer(source, at, parse(f"process_start_time_seconds {start}\n{text}"), checks or {"phase": "ok"})


def text_with(text: str, **values: float) -> str:
    """`text` with other values of unlabelled metrics, named without `rl_trainer_` and `rl_producer_`."""
    lines = []
    for line in text.splitlines():
        name = line.split()[0]
        short = name.removeprefix("rl_trainer_").removeprefix("rl_producer_")
        lines.append(f"{name} {values.pop(short)}" if short in values else line)
    assert not values, values
    return "\n".join(lines) + "\n"


def seen(trainer: dict[str, Any] | None = None, *producers: ProducerView, **fields: Any) -> View:
    """A view with a trainer of these numbers."""
    shown = (
        None
        if trainer is None
        else TrainerView(**{"address": "h:1", "daemon": "t", "error": None, "not_ready": {}} | trainer)
    )
    return View(**{"at": 1000.0, "trainer": shown, "producers": list(producers), "rewards": {}, "silent": {}} | fields)


def producer(**fields: Any) -> ProducerView:
    return ProducerView(**{"name": "p1", "address": "h:2"} | fields)
