"""Says what is wrong with a run, and what to do about it.

Guarantee: pure; there is one rule for each known trouble; every threshold is in `LIMITS`, and a rule whose numbers are not known
says nothing. docs/monitoring.md lists the rules by name.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tools.status.daemons import NO_STATUS
from tools.status.text import percent
from tools.status.view import TrainerView, View


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
    dead_letter_share: float = 0.05  # of the prompts that were answered or given up
    num_dead_letters: int = 4
    step_paces: float = 5.0  # without a step
    no_step_s: float = 60.0  # at least; the alert waits for a quarter of an hour
    heard_s: float = 5.0


LIMITS = Thresholds()


class Warned(NamedTuple):
    """
    Args:
        name: of the rule.
        text: what is wrong.
        cure: what to do.
    """

    name: str
    text: str
    cure: str


Found = Iterator[tuple[str, str]]
"""What is wrong, and what to do about it."""

Rule = Callable[[View, TrainerView], Found]
"""The trainer's numbers are all None where there is no trainer."""


def warnings(view: View) -> list[Warned]:
    """The rules that apply, the worst first."""
    trainer = view.trainer or TrainerView()
    return [Warned(name, *found) for name, rule in RULES.items() for found in rule(view, trainer)]


def _nothing_answers(view: View, _: TrainerView) -> Found:
    if not view.answers:
        yield "no daemon of this run answers", "start rl-trainer and rl-producer, or name their addresses with --url"


def _daemon_gone(view: View, trainer: TrainerView) -> Found:
    gone = [(f"the trainer at {trainer.address}", trainer.error, "rl-trainer --resume goes on")]
    cure = "start it again; its prompts go out again by themselves"
    gone += [(f"producer {producer.name}", producer.error, cure) for producer in view.producers]
    gone += [(address, error, "compare the address with RUN_DIR/metrics") for address, error in view.silent.items()]
    for name, error, cure in gone:
        if error:
            yield f"{name}: {error}", "use the rl-status of its release" if error == NO_STATUS else cure


def _not_ready(view: View, trainer: TrainerView) -> Found:
    reasons = [("the trainer", trainer.not_ready)]
    reasons += [(f"producer {producer.name}", producer.not_ready) for producer in view.producers]
    for name, not_ready in reasons:
        for what, why in not_ready.items():
            if what == "phase":
                yield f"{name} is not ready ({why})", "wait"
            elif what != "disk":  # has a rule of its own
                yield f"{name} is not ready ({what}: {why})", _CURES.get(what, "its log says more")


_CURES = {
    "producers": "start a producer with the same file",
    "trainer": "start the trainer with the same file, or compare `control endpoint` in --check",
    "swap": "restart it if the next versions are refused, too",
    "weights": "they come with the first policy version",
    "journal": "look at the disk of run_dir",
}


def _nonfinite_steps(view: View, trainer: TrainerView) -> Found:
    if count := trainer.nonfinite_steps:
        text = f"{_number_of(count, 'step')} of this process had a NaN or infinite loss or gradient"
        yield text, "lower trainer.learning_rate, bound the ratio (correction.preset), go back to a checkpoint"


def _no_progress(view: View, trainer: TrainerView) -> Found:
    since_s, pace_s = trainer.since_last_step_s, trainer.step_pace_s
    if since_s is not None and pace_s is not None and since_s > max(LIMITS.no_step_s, LIMITS.step_paces * pace_s):
        yield (
            f"no step for {since_s:.0f} s, at a pace of one in {pace_s:.1f} s",
            "its log says whom the trainer waits for; it ends with code 75 after pipeline.stall_timeout_s",
        )


def _disk_nearly_full(view: View, trainer: TrainerView) -> Found:
    used, limit = trainer.disk_used_share, trainer.disk_limit_share
    if used is not None and limit is not None and used > LIMITS.disk_share * limit:
        stopped = "no leases are given until there is room" if used > limit else f"leases stop at {percent(limit)}"
        yield f"the disk of run_dir is {percent(used)} full, {stopped}", "make room, or raise replay.max_disk_used"


def _swaps_refused(view: View, _: TrainerView) -> Found:
    cure = "it goes on with the one before; its log and the trainer's say why"
    for producer in view.producers:
        if (version := producer.refused_version) is not None and version >= 0:
            yield f"producer {producer.name} refuses policy version {version}", cure
        elif count := producer.swaps.get("refused", 0):
            yield f"producer {producer.name} refused {_number_of(count, 'policy version')} since its start", cure


def _heartbeat_stale(view: View, _: TrainerView) -> Found:
    for producer in view.producers:
        if producer.heard_s is not None and producer.heard_s > LIMITS.heard_s:
            yield (
                f"the trainer has not heard producer {producer.name} for {producer.heard_s:.0f} s",
                "look at its machine; after transport.heartbeat_timeout_s its prompts go out again",
            )


def _trainer_starved(view: View, trainer: TrainerView) -> Found:
    if trainer.wait_share is None or trainer.wait_share <= LIMITS.wait_share:
        return
    cure = "add a producer or raise pipeline.max_staleness"
    if trainer.max_staleness == 0:
        cure = "with pipeline.max_staleness 0 the two take turns; 1 lets them work at the same time"
    elif min(_idle_shares(view), default=0.0) > LIMITS.idle_share:
        cure = "producers idle too: raise pipeline.max_staleness"
    yield f"trainer waits {percent(trainer.wait_share)} of the time for rollouts", cure


def _producer_idle(view: View, _: TrainerView) -> Found:
    for producer in view.producers:
        if producer.idle_share is not None and producer.idle_share > LIMITS.idle_share:
            text = f"producer {producer.name} has nothing to do {percent(producer.idle_share)} of the time"
            yield text, "raise pipeline.max_staleness, or do with fewer producers"


def _staleness_at_bound(view: View, trainer: TrainerView) -> Found:
    mean, bound, idle = trainer.staleness_mean, trainer.max_staleness, _idle_shares(view)
    if mean is None or not bound or not idle or sum(idle) / len(idle) <= LIMITS.held_back_share:
        return
    if mean > LIMITS.staleness_share * bound:
        yield (
            f"staleness is at its bound, {mean:.1f} of {bound:.0f} versions, and producers stop for it",
            "training is the bottleneck: more groups per step, or fewer producers",
        )


def _effective_sample_low(view: View, trainer: TrainerView) -> Found:
    share = trainer.effective_sample_share
    if share is not None and share < LIMITS.effective_sample_share:
        cure = "too far off-policy: lower pipeline.max_staleness (or `auto`), or the learning rate"
        yield f"the effective sample size is {percent(share)} of the tokens", cure


def _completions_truncated(view: View, trainer: TrainerView) -> Found:
    if (share := trainer.truncated_share or 0.0) > LIMITS.truncated_share:
        cure = "raise sampling.max_completion_length, or punish length (rewards)"
        yield f"{percent(share)} of the completions are cut off at the greatest length", cure


def _zero_signal(view: View, trainer: TrainerView) -> Found:
    if (share := trainer.zero_signal_share or 0.0) > LIMITS.zero_signal_share:
        cure = "an easier or harder mix of prompts; replay.mode: signal fills the batches"
        yield f"{percent(share)} of the groups have nothing to teach, all their rewards are equal", cure


def _dead_letters(view: View, trainer: TrainerView) -> Found:
    given_up = trainer.dead_letters or 0
    answered = sum(trainer.groups_received.get(outcome, 0) for outcome in ("accepted", "no_signal"))
    if given_up > LIMITS.num_dead_letters and given_up > LIMITS.dead_letter_share * (given_up + answered):
        text = f"{percent(given_up / (given_up + answered))} of the prompts were given up, {given_up}"
        yield text, "rl-journal quarantine says which and why"


def _connections_refused(view: View, trainer: TrainerView) -> Found:
    for reason, count in trainer.connections_refused.items():
        if count:
            what = f"{_number_of(count, 'connection')} refused since the trainer's start: {reason.replace('_', ' ')}"
            yield what, "its log says whose; `rl-keys authorize` lets a key in"


def _frames_refused(view: View, trainer: TrainerView) -> Found:
    if count := trainer.frames_refused:
        text = f"{_number_of(count, 'frame')} that came in {'was' if count == 1 else 'were'} no message"
        yield text, "something else talks to the endpoint; rl-journal quarantine shows them"


def _idle_shares(view: View) -> list[float]:
    return [producer.idle_share for producer in view.producers if producer.idle_share is not None]


def _number_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


RULES: dict[str, Rule] = {
    rule.__name__.removeprefix("_"): rule
    for rule in (
        _nothing_answers,
        _daemon_gone,
        _not_ready,
        _nonfinite_steps,
        _no_progress,
        _disk_nearly_full,
        _swaps_refused,
        _heartbeat_stale,
        _trainer_starved,
        _producer_idle,
        _staleness_at_bound,
        _effective_sample_low,
        _completions_truncated,
        _zero_signal,
        _dead_letters,
        _connections_refused,
        _frames_refused,
    )
}
