"""Warns of what is wrong with a run, with the fix.

Guarantee: pure; there is one rule for each known trouble; every threshold is in `LIMITS`, and a rule whose numbers are not known
is silent. docs/monitoring.md lists the rules by name. The trainer's numbers are all None where there is no trainer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.status.reading import TrainerView, View
from slipstream.tables import percent


@dataclass(frozen=True)
class Thresholds:
    """A rule warns above these, for `effective_sample_share` below. The alerts of Prometheus have the same, over longer times."""

    wait_share: float = 0.5
    idle_share: float = 0.5
    staleness_share: float = 0.9  # mean staleness over its bound
    held_back_share: float = 0.2  # idle time of producers at which that bound matters
    effective_sample_share: float = 0.5
    truncated_share: float = 0.25
    zero_signal_share: float = 0.5
    disk_share: float = 0.95  # of the limit
    teacher_failed_share: float = 0.05  # of the completions
    dead_letter_share: float = 0.05  # of the prompts that were answered or given up
    num_dead_letters: int = 4
    step_paces: float = 5.0  # without a step
    no_step_s: float = 60.0  # at least; the alert waits for a quarter of an hour
    heard_s: float = 5.0


LIMITS = Thresholds()


class Warned(NamedTuple):
    name: str  # of the rule
    text: str  # what is wrong
    cure: str  # what to do


RULES = (
    "dead_reward",
    "nothing_answers", "daemon_gone", "not_ready", "nonfinite_steps", "no_progress", "disk_nearly_full", "swaps_refused",
    "prompts_differ", "teacher_failing", "heartbeat_stale", "trainer_starved", "producer_idle", "staleness_at_bound",
    "effective_sample_low", "completions_truncated", "zero_signal", "environment_skipped", "dead_letters",
    "connections_refused", "frames_refused",
)  # fmt: skip
"""The worst first."""

_CURES = {
    "producers": "start a producer with the same file",
    "trainer": "start the trainer with the same file, or compare `control endpoint` in --check",
    "swap": "restart it if the next versions are refused, too",
    "weights": "they come with the first policy version",
    "journal": "check the disk of run_dir",
}


def warnings(view: View) -> list[Warned]:
    """Return the warnings that apply, the worst first."""
    trainer = view.trainer or TrainerView()
    found = [
        *_of_rewards(view, trainer),
        *_of_daemons(view, trainer),
        *_of_producers(view),
        *_of_the_pipeline(view, trainer),
        *_of_training(trainer),
    ]
    found += _of_what_was_refused(trainer)
    return sorted(found, key=lambda warned: RULES.index(warned.name))


def as_dict(view: View) -> dict[str, Any]:
    """Return the view with its warnings, for programs."""
    return view.as_dict() | {"warnings": [warning._asdict() for warning in warnings(view)]}


def _of_rewards(view: View, trainer: TrainerView) -> Iterator[Warned]:
    for name, groups in (view.ended.dead_rewards if view.ended else trainer.dead_rewards).items():
        if groups:
            text = f"the reward {name} gave no number to any completion of {_number_of(int(groups), 'group')}"
            yield Warned("dead_reward", text, "`slipstream reward try` shows why; trained was what the others said")


def _of_daemons(view: View, trainer: TrainerView) -> Iterator[Warned]:
    if view.ended and not view.ended.finished:
        yield Warned("nothing_answers", f"the run was {view.ended.text}", "rl-trainer --resume goes on")
    elif not view.answers and not view.ended:
        cure = "start it, with --resume where it has begun; slipstream status --url asks daemons of other hosts"
        yield Warned("nothing_answers", "no daemon of this run answers", cure)
    gone = [(f"the trainer at {trainer.address}", trainer.error, "rl-trainer --resume goes on")]
    cure = "start it again; its prompts go out again by themselves"
    gone += [(f"producer {producer.name}", producer.error, cure) for producer in view.producers]
    gone += [(address, error, "compare the address with RUN_DIR/metrics") for address, error in view.silent.items()]
    for name, error, cure in gone:
        if error:
            yield Warned("daemon_gone", f"{name}: {error}", cure)
    reasons = [("the trainer", trainer.not_ready)]
    reasons += [(f"producer {producer.name}", producer.not_ready) for producer in view.producers]
    for name, not_ready in reasons:
        for what, why in not_ready.items():
            if what == "phase":
                yield Warned("not_ready", f"{name} is not ready ({why})", "wait")
            elif what != "disk":  # has a rule of its own
                text = f"{name} is not ready ({what}: {why})"
                yield Warned("not_ready", text, _CURES.get(what, "its log has more"))


def _of_producers(view: View) -> Iterator[Warned]:
    for producer in view.producers:
        name, cure = (
            f"producer {producer.name}",
            "its log has the reason; the run ends when every producer refuses swap.max_refused versions in a row",
        )
        if (version := producer.refused_version) is not None and version >= 0:
            yield Warned("swaps_refused", f"{name} refuses policy version {version}", cure)
        elif count := producer.swaps.get("refused", 0):
            text = f"{name} refused {_number_of(count, 'policy version')} since its start"
            yield Warned("swaps_refused", text, cure)
        for teacher, share in producer.teacher_failed_shares.items():
            if share > LIMITS.teacher_failed_share:
                text = f"teacher {teacher} fails to score {percent(share)} of the completions of {name}"
                yield Warned("teacher_failing", text, "start it again; its log and the producer's have the reason")
        if producer.heard_s is not None and producer.heard_s > LIMITS.heard_s:
            text = f"the trainer has not heard {name} for {producer.heard_s:.0f} s"
            cure = "check its machine; after transport.heartbeat_timeout_s its prompts go out again"
            yield Warned("heartbeat_stale", text, cure)
        if producer.idle_share is not None and producer.idle_share > LIMITS.idle_share:
            text = f"{name} has nothing to do {percent(producer.idle_share)} of the time"
            yield Warned("producer_idle", text, "raise pipeline.max_staleness, or do with fewer producers")


def _of_the_pipeline(view: View, trainer: TrainerView) -> Iterator[Warned]:
    since_s, pace_s = trainer.since_last_step_s, trainer.step_pace_s
    if since_s is not None and pace_s is not None and since_s > max(LIMITS.no_step_s, LIMITS.step_paces * pace_s):
        text = f"no step for {since_s:.0f} s, at a pace of one in {pace_s:.1f} s"
        cure = "its log names whom the trainer waits for; it ends with code 75 after pipeline.stall_timeout_s"
        yield Warned("no_progress", text, cure)
    used, limit = trainer.disk_used_share, trainer.disk_limit_share
    if used is not None and limit is not None and used > LIMITS.disk_share * limit:
        stopped = "no leases are given until there is room" if used > limit else f"leases stop at {percent(limit)}"
        text = f"the disk of run_dir is {percent(used)} full, {stopped}"
        yield Warned("disk_nearly_full", text, "make room, or raise replay.max_disk_used")
    idle = [producer.idle_share for producer in view.producers if producer.idle_share is not None]
    takes_turns = trainer.gpu_side is not None  # then one side waits for the other all the time
    if trainer.wait_share is not None and trainer.wait_share > LIMITS.wait_share and not takes_turns:
        cure = "add a producer or raise pipeline.max_staleness"
        if trainer.max_staleness == 0:
            cure = "with pipeline.max_staleness 0 the two take turns; 1 lets them work at the same time"
        elif min(idle, default=0.0) > LIMITS.idle_share:
            cure = "producers idle too: raise pipeline.max_staleness"
        yield Warned("trainer_starved", f"trainer waits {percent(trainer.wait_share)} of the time for rollouts", cure)
    mean, bound = trainer.staleness_mean, trainer.max_staleness
    is_held_back = bool(idle) and sum(idle) / len(idle) > LIMITS.held_back_share
    if mean is not None and bound and is_held_back and mean > LIMITS.staleness_share * bound:
        text = f"staleness is at its bound, {mean:.1f} of {bound:.0f} versions, and producers stop for it"
        cure = "training is the bottleneck: more groups per step, or fewer producers"
        yield Warned("staleness_at_bound", text, cure)


def _of_training(trainer: TrainerView) -> Iterator[Warned]:
    if count := trainer.nonfinite_steps:
        text = f"{_number_of(count, 'step')} of this process had a NaN or infinite loss or gradient"
        cure = "lower trainer.learning_rate, bound the ratio (correction.preset), go back to a checkpoint"
        yield Warned("nonfinite_steps", text, cure)
    if count := trainer.prompts_differ:
        text = f"{_number_of(count, 'compared prompt')} had other tokens at a producer than at the trainer"
        cure = (
            "give both the same tokenizer, chat template and release of transformers; the trainer's log has the place"
        )
        yield Warned("prompts_differ", text, cure)
    share = trainer.effective_sample_share
    if share is not None and share < LIMITS.effective_sample_share:
        cure = "too far off-policy: lower pipeline.max_staleness or the learning rate"
        yield Warned("effective_sample_low", f"the effective sample size is {percent(share)} of the tokens", cure)
    if (share := trainer.truncated_share or 0.0) > LIMITS.truncated_share:
        text = f"{percent(share)} of the completions are cut off at the greatest length"
        yield Warned("completions_truncated", text, "raise sampling.max_completion_length, or punish length (rewards)")
    if (share := trainer.zero_signal_share or 0.0) > LIMITS.zero_signal_share:
        text = f"{percent(share)} of the groups have no signal: all their rewards are equal"
        cure = "easier or harder prompts: dataset.sampling: by_signal, reroll.solved_cooldown_epochs, or a curriculum"
        yield Warned("zero_signal", text, cure)


def _of_what_was_refused(trainer: TrainerView) -> Iterator[Warned]:
    given_up = trainer.dead_letters or 0
    finished = given_up + sum(trainer.groups_received.get(outcome, 0) for outcome in ("accepted", "no_signal"))
    if given_up > LIMITS.num_dead_letters and given_up > LIMITS.dead_letter_share * finished:
        text = f"{percent(given_up / finished)} of the prompts were given up, {given_up}"
        yield Warned("dead_letters", text, "slipstream journal quarantine lists them with reasons")
    for name in filter(trainer.environment_skipped.get, trainer.environment_skipped):
        text = f"the run goes on without the environment {name}, whose prompts are given up"
        yield Warned(
            "environment_skipped", text, "repair it, stop the run, and go on with --resume, which tries it again"
        )
    for reason, count in trainer.connections_refused.items():
        if count:
            text = f"{_number_of(count, 'connection')} refused since the trainer's start: {reason.replace('_', ' ')}"
            yield Warned("connections_refused", text, "its log names them; `slipstream keys authorize` lets a key in")
    if frames := trainer.frames_refused:
        text = f"{_number_of(frames, 'frame')} that came in {'was' if frames == 1 else 'were'} no message"
        yield Warned(
            "frames_refused", text, "something else talks to the endpoint; slipstream journal quarantine shows them"
        )


def _number_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
