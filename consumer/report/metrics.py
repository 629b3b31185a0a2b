"""The trainer's view of the pipeline as Prometheus metrics: leases, groups, queues, journal, disk, producers, evaluations.

Guarantee: the numbers are those that the parts have at the moment of the scrape; totals go on where a resumed run's left off.
Those of evaluations are NaN or 0 in a run without, and NaN before the first result of this process.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, Info

from consumer.evaluate.control import EvaluationControl
from consumer.evaluate.evaluation import scores_of_sources
from consumer.link.commit_queue import RolloutStorage
from consumer.link.gpu_turns import PHASES, GpuTurns
from consumer.link.intake import Intake
from consumer.link.sessions import ProducerSession
from consumer.ranks.exchange import RankWork
from protocol import __version__
from protocol.runtime.metrics import Readings
from replay.buffer import RolloutBuffer
from replay.sources import total_of

_MOST_NAMED = 128  # producers

COMMIT_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

_OUTCOMES = ("accepted", "no_signal", "stale", "duplicate", "unknown_lease", "invalid")
_FAILURES = (
    "prompt_too_long", "bad_prompt", "reward_failed", "environment_failed", "generation_failed", "no_policy",
    "invalid", "expired", "released",
)  # fmt: skip
_TOTALS = {
    "leased": ("leases_given", "Leases given."),
    "adopted": ("leases_adopted", "Leases from an earlier trainer process."),
    "returned": ("leases_returned", "Leases that producers handed back unanswered."),
    "trained": ("groups_trained", "Groups trained for the first time."),
    "replayed": ("groups_replayed", "Uses of groups that were replayed."),
    "went_stale": ("groups_went_stale", "Accepted groups that were too old when the batch was cut."),
    "quarantined": ("groups_quarantined", "Groups in whose step the trainer died too often."),
    "dead_letters": ("dead_letters", "Prompts given up for their epoch."),
    "deferred": ("rerolls_deferred", "Prompts whose group failed and that will return."),
    "rerolls_leased": ("rerolls_leased", "Leases given for prompts that returned."),
    "skipped": ("prompts_skipped", "Prompts not asked in an epoch, by dataset.sampling."),
    "rested": ("prompts_rested", "Solved prompts in cooldown."),
    "swaps_refused": ("swaps_refused", "Policy versions that producers refused, once for each producer."),
    "prompts_differ": ("prompts_differ", "Compared groups whose prompt has other tokens at the trainer."),
    "bad_frames": ("frames_refused", "Frames that were no message; kept for `slipstream journal quarantine`."),
}
_OF_A_SOURCE = (
    "leased", "failed", "dead_letters", "accepted", "no_signal", "stale", "went_stale", "trained", "replayed",
)  # fmt: skip
_DEPTHS = {
    "ready": ("groups_ready", "Fresh groups that wait for a batch."),
    "replayable": ("groups_replayable", "Groups that may be replayed."),
    "leased": ("leases_out", "Leases that producers hold."),
    "deferred": ("rerolls_waiting", "Prompts that wait to return."),
    "epoch": ("epoch", "Pass over the dataset, counted from 0."),
}
_FLEET: dict[str, tuple[str, Callable[[ProducerSession, Intake], float]]] = {
    "policy_version": (
        "Version that each producer serves; -1 while none.",
        lambda producer, _: producer.heartbeat.policy_version,
    ),
    "refused_version": (
        "Version that each producer refuses; -1 while none.",
        lambda producer, _: producer.heartbeat.refused_version,
    ),
    "lag_versions": (
        "Versions by which each producer is behind the newest.",
        lambda producer, intake: intake.store.newest.version - producer.heartbeat.policy_version,
    ),
    "leases": ("Leases of each producer.", lambda producer, _: len(producer.leases)),
    "heard_seconds": (
        "Time since each producer was last heard.",
        lambda producer, intake: intake.clock() - producer.last_heard,
    ),
}


def commit_seconds(registry: CollectorRegistry) -> Histogram:
    """Make the histogram of commits, which is observed as they happen; the other metrics are read at the scrape."""
    return Histogram(
        "rl_trainer_journal_commit_seconds", "Duration of durable commits to the journal.",
        buckets=COMMIT_BUCKETS_S, registry=registry,
    )  # fmt: skip


def watch_trainer(
    registry: CollectorRegistry,
    run_id: str,
    storage: RolloutStorage,
    intake: Intake,
    refusals: Mapping[str, int],
    waiting_s: Callable[[], float],
) -> None:
    """Register the metrics that are read at the scrape, once the first policy is published. `refusals` counts those of the
    server's sockets by reason; `waiting_s` returns the seconds of the wait for rollouts in progress."""
    Info("rl_trainer", "The run and this release.", registry=registry).info({"run": run_id, "release": __version__})
    readings = Readings(registry)
    _watch_buffer(readings, storage.buffer)
    _watch_environments(readings, storage.buffer)
    _watch_fleet(readings, intake)
    _, journal, disk = storage
    readings.counters(
        "rl_trainer_connections_refused_total",
        "Refused connections and messages (docs/security.md).",
        "reason",
        lambda: refusals,
    )
    gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("waiting_seconds", "Length of the current wait for rollouts, else 0.", waiting_s),
        ("policy_version", "Newest published policy version.", lambda: intake.store.newest.version),
        ("producers_connected", "Producers connected.", lambda: len(intake.fleet.sessions)),
        ("arrivals_unwritten", "Groups that wait for a commit.", lambda: len(intake.commits.waiting())),
        ("journal_bytes", "Size of the journal's files.", lambda: _file_bytes(journal.path)),
        ("disk_used_ratio", "Share of run_dir's disk in use.", lambda: disk.used),
        ("disk_used_limit_ratio", "Share above which no leases are given.", lambda: disk.max_used),
    )
    for name, text, read in gauges:
        readings.gauge(f"rl_trainer_{name}", text, read)


def _watch_buffer(readings: Readings, buffer: RolloutBuffer) -> None:
    for key, (name, text) in _TOTALS.items():
        readings.counter(f"rl_trainer_{name}_total", text, lambda key=key: buffer.totals[key])  # type: ignore[misc]
    for key, (name, text) in _DEPTHS.items():
        readings.gauge(f"rl_trainer_{name}", text, lambda key=key: buffer.depth()[key])  # type: ignore[misc]
    readings.counters(
        "rl_trainer_groups_received_total",
        "Groups that producers delivered; no_signal: all rewards equal.",
        "outcome",
        lambda: {outcome: buffer.totals[outcome] for outcome in _OUTCOMES},
    )
    readings.counters(
        "rl_trainer_leases_failed_total",
        "Leases that ended without a group.",
        "reason",
        lambda: {reason: buffer.totals[f"failed_{reason}"] for reason in _FAILURES},
    )
    readings.counters(
        "rl_trainer_completions_scored_total",
        "Completions that the judging reward scored, by attempt at their prompt.",
        "attempt",
        lambda: by_attempt(buffer.totals, "scored"),
    )
    readings.counters(
        "rl_trainer_completions_solved_total",
        "Completions that the judging reward called solved.",
        "attempt",
        lambda: by_attempt(buffer.totals, "successes"),
    )
    readings.gauges(
        "rl_trainer_reward_dead_groups",
        "Groups of a reward that has scored none of any; else 0.",
        "function",
        lambda: buffer.rewards.dead(buffer.totals),
    )
    readings.counters(
        "rl_trainer_source_groups_total",
        "Leases given and failed, prompts given up and groups, by source (dataset.sources).",
        ("source", "outcome"),
        lambda: {
            (source, outcome): buffer.totals[total_of(source, outcome)]
            for source in buffer.sources.names
            for outcome in _OF_A_SOURCE
        },
    )


def _watch_environments(readings: Readings, buffer: RolloutBuffer) -> None:
    readings.gauge(
        "rl_trainer_environments_skipped", "Environments that the run goes on without (on_failure: skip).",
        lambda: len(buffer.failures.skipped),
    )  # fmt: skip
    environments = buffer.sources.environments
    readings.counters(
        "rl_trainer_environment_groups_total",
        "Like `rl_trainer_source_groups_total`, by environment.",
        ("environment", "outcome"),
        lambda: {
            (name, outcome): buffer.totals[environments.total_of(name, outcome)]
            for name in environments.names
            for outcome in _OF_A_SOURCE
        },
    )
    for name, text, field in (
        ("leases", "Leases in flight by environment (environments).", "leases"),
        ("skipped", "1 for an environment that the run goes on without.", "is_skipped"),
    ):
        readings.gauges(
            f"rl_trainer_environment_{name}", text, "environment",
            lambda field=field: {name: getattr(each, field) for name, each in buffer.environments().items()},  # type: ignore[misc]
        )  # fmt: skip


def _watch_fleet(readings: Readings, intake: Intake) -> None:
    """Watch each connected producer; only those, so that names of past ones do not pile up, and of a large fleet those that are
    connected longest, so that a scrape delays no acknowledgement."""

    def connected() -> list[ProducerSession]:
        return list(intake.fleet.sessions.values())[:_MOST_NAMED]

    readings.counter(
        "rl_trainer_tokens_generated_total", "Tokens that producers generated.", lambda: intake.fleet.tokens_generated
    )
    readings.counter(
        "rl_trainer_producers_stopped_total",
        "Producers that were stopped or drained, not lost.",
        lambda: intake.fleet.num_goodbyes,
    )
    readings.gauges(
        "rl_trainer_producer_info",
        "1, by connected producer and its release.",
        ("producer", "release"),
        lambda: {(producer.name, producer.release): 1 for producer in connected()},
    )
    readings.counters(
        "rl_trainer_producer_idle_seconds_total",
        "Time of each producer without a request in its engine.",
        "producer",
        lambda: {producer.name: producer.heartbeat.idle_s for producer in connected()},
    )
    for name, (text, value) in _FLEET.items():
        readings.gauges(
            f"rl_trainer_producer_{name}", text, "producer",
            lambda value=value: {each.name: value(each, intake) for each in connected()},  # type: ignore[misc]
        )  # fmt: skip


def by_attempt(counts: Mapping[str, int], kind: str) -> dict[str, int]:
    """Counts called `attempt_N_<kind>`, by N. Attempt 1 is always there."""
    found = {"1": 0}
    for name, count in dict(counts).items():
        if name.startswith("attempt_") and name.endswith(f"_{kind}"):
            found[name.split("_")[1]] = count
    return found


def _file_bytes(journal_file: Path) -> int:
    files = (journal_file, journal_file.with_name(f"{journal_file.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


_LAST_EVALUATION = {
    "score": ("score", "Score of the last evaluation."),
    "version": ("version", "Policy version of the last evaluation."),
    "duration_seconds": ("duration_s", "Duration of the last evaluation."),
    "completion_length_mean_tokens": ("mean_length", "Mean length of completions in the last evaluation."),
}
_EVALUATION_IN_PROGRESS = {
    "prompts": ("num_prompts", "Prompts of the evaluation in progress."),
    "prompts_done": ("num_done", "Finished prompts of the evaluation in progress."),
    "leases": ("num_out", "Leases of the evaluation in progress."),
}


def watch_evaluation(registry: CollectorRegistry, evaluation: EvaluationControl | None) -> None:
    """Watch the evaluations; None: the run has none."""
    readings = Readings(registry)

    def gauge(name: str, text: str, read: Callable[[EvaluationControl], float | None], otherwise: float) -> None:
        def value() -> float:
            found = read(evaluation) if evaluation else None
            return otherwise if found is None else float(found)

        readings.gauge(f"rl_trainer_evaluation_{name}", text, value)

    for name, (key, text) in _LAST_EVALUATION.items():
        gauge(name, text, lambda each, key=key: (each.last or {}).get(key), math.nan)  # type: ignore[misc]
    gauge("best_score", "Best score of the run.", lambda each: each.results.best_score, math.nan)
    text = "Evaluations since the last improvement."
    gauge("without_improvement", text, lambda each: each.results.num_without_improvement, 0)
    readings.gauges(
        "rl_trainer_evaluation_source_score", "Score of the last evaluation by source.", "source",
        lambda: scores_of_sources(evaluation.last or {}) if evaluation else {},
    )  # fmt: skip
    for name, (key, text) in _EVALUATION_IN_PROGRESS.items():
        gauge(name, text, lambda each, key=key: getattr(each.leases.progress, key), 0)  # type: ignore[misc]

    def totals() -> dict[str, int]:
        counts = evaluation.totals if evaluation else Counter[str]()
        skipped = evaluation.due.num_skipped if evaluation else 0
        return {outcome: counts[outcome] for outcome in ("scored", "incomplete")} | {"skipped": skipped}

    text = "Evaluations; incomplete: too few scores; skipped: the former took too long."
    readings.counters("rl_trainer_evaluations_total", text, "outcome", totals)


def watch_turns(registry: CollectorRegistry, turns: GpuTurns | None) -> None:
    """Watch whose turn it is on the GPU; None: it is not shared."""
    readings = Readings(registry)
    readings.gauges(
        "rl_trainer_gpu_turn",
        "1 for the side whose turn on the GPU it is (pipeline.gpu: turns).",
        "side",
        lambda: {str(phase): float(turns is not None and turns.phase()[0] == phase) for phase in PHASES},
    )
    readings.gauge(
        "rl_trainer_gpu_turn_age_seconds",
        "Age of the current turn.",
        lambda: turns.phase()[1] if turns else math.nan,
    )
    readings.counters(
        "rl_trainer_gpu_turn_seconds_total",
        "Time of each since the trainer started.",
        "side",
        lambda: {str(phase): turns.spent_s()[phase] if turns else 0.0 for phase in PHASES},
    )


_RANK_WORK = {
    "step_s": ("step_seconds", "Duration of the last step on each rank."),
    "waited_s": ("waiting_seconds", "Time of the last step that each rank waited."),
    "num_tokens": ("tokens", "Tokens of the last step on each rank, without padding, shared ones once."),
    "memory_bytes": (
        "memory_bytes",
        "Peak memory of each rank in the last step: of tensors on its GPU, or of the process.",
    ),
}


def watch_ranks(registry: CollectorRegistry, works: Sequence[RankWork]) -> None:
    """
    Args:
        works: of the last step, by rank; empty for a trainer that is one process.
    """
    readings = Readings(registry)
    for field, (name, text) in _RANK_WORK.items():
        readings.gauges(
            f"rl_trainer_rank_{name}", text, "rank",
            lambda field=field: {str(rank): getattr(work, field) for rank, work in enumerate(works)},  # type: ignore[misc]
        )  # fmt: skip
