"""What is wrong with a run, in words, and what to do about it.

Guarantee: pure; one rule per known trouble; every threshold stands in `THRESHOLDS`, and a rule whose numbers are not known
says nothing. docs/monitoring.md lists the rules by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tools.status.text import percent
from tools.status.view import ProducerView, TrainerView, View


@dataclass(frozen=True)
class Thresholds:
    """A rule warns above these, of `effective_sample_share` below; the alerts of Prometheus have the same, over longer times."""

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


THRESHOLDS = Thresholds()


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


class Rule(Protocol):
    """Yields what is wrong and what to do about it."""

    __name__: str

    def __call__(self, view: View, limits: Thresholds, /) -> Iterator[tuple[str, str]]: ...


def warnings(view: View, thresholds: Thresholds = THRESHOLDS) -> list[Warned]:
    """The worst first."""
    return [Warned(rule.__name__, *found) for rule in RULES for found in rule(view, thresholds)]


def nothing_answers(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    if not view.answers:
        yield "no daemon of this run answers", "start rl-trainer and rl-producer, or name their addresses with --url"


def daemon_gone(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    if view.trainer and view.trainer.error:
        yield f"the trainer at {view.trainer.address}: {view.trainer.error}", "rl-trainer --resume goes on"
    for producer in view.producers:
        if producer.error:
            yield (
                f"producer {producer.name}: {producer.error}",
                "start it again; its prompts go out again by themselves",
            )
    for address, error in view.silent.items():
        yield f"{address}: {error}", "compare the address with RUN_DIR/metrics"


def not_ready(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    daemons: list[tuple[str, TrainerView | ProducerView]] = [("the trainer", view.trainer)] if view.trainer else []
    daemons += [(f"producer {producer.name}", producer) for producer in view.producers]
    for name, daemon in daemons:
        for what, why in daemon.not_ready.items():
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


def nonfinite_steps(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    if count := _of_trainer(view, "nonfinite_steps"):
        text = f"{count:.0f} {_plural(count, 'step')} of this process had a NaN or infinite loss or gradient"
        yield text, "lower trainer.learning_rate, bound the ratio (correction.preset), go back to a checkpoint"


def no_progress(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    since_s, pace_s = _of_trainer(view, "since_last_step_s"), _of_trainer(view, "step_pace_s")
    if since_s is not None and pace_s is not None and since_s > max(limits.no_step_s, limits.step_paces * pace_s):
        yield (
            f"no step for {since_s:.0f} s, at a pace of one in {pace_s:.1f} s",
            "its log says whom the trainer waits for; it ends with code 75 after pipeline.stall_timeout_s",
        )


def disk_nearly_full(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    used, limit = _of_trainer(view, "disk_used_share"), _of_trainer(view, "disk_limit_share")
    if used is not None and limit is not None and used > limits.disk_share * limit:
        stopped = "no leases are given until there is room" if used > limit else f"leases stop at {percent(limit)}"
        yield f"the disk of run_dir is {percent(used)} full, {stopped}", "make room, or raise replay.max_disk_used"


def swaps_refused(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    for producer in view.producers:
        cure = "it goes on with the one before; its log and the trainer's say why"
        if (version := producer.refused_version) is not None and version >= 0:
            yield f"producer {producer.name} refuses policy version {version}", cure
        elif count := producer.swaps.get("refused", 0):
            yield f"producer {producer.name} refused {count} policy {_plural(count, 'version')} since its start", cure


def heartbeat_stale(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    for producer in view.producers:
        if producer.heard_s is not None and producer.heard_s > limits.heard_s:
            yield (
                f"the trainer has not heard producer {producer.name} for {producer.heard_s:.0f} s",
                "look at its machine; after transport.heartbeat_timeout_s its prompts go out again",
            )


def trainer_starved(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    share = _of_trainer(view, "wait_share")
    if share is None or share <= limits.wait_share:
        return
    idle = _idle_shares(view)
    if _of_trainer(view, "max_staleness") == 0:
        cure = "with pipeline.max_staleness 0 the two take turns; 1 lets them work at the same time"
    elif idle and min(idle) > limits.idle_share:
        cure = "producers idle too: raise pipeline.max_staleness"
    else:
        cure = "add a producer or raise pipeline.max_staleness"
    yield f"trainer waits {percent(share)} of the time for rollouts", cure


def producer_idle(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    for producer in view.producers:
        if producer.idle_share is not None and producer.idle_share > limits.idle_share:
            cure = "raise pipeline.max_staleness, or do with fewer producers"
            yield f"producer {producer.name} has nothing to do {percent(producer.idle_share)} of the time", cure


def staleness_at_bound(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    mean, bound = _of_trainer(view, "staleness_mean"), _of_trainer(view, "max_staleness")
    idle = _idle_shares(view)
    if mean is None or not bound or not idle:
        return
    if mean > limits.staleness_share * bound and sum(idle) / len(idle) > limits.held_back_share:
        yield (
            f"staleness is at its bound, {mean:.1f} of {bound:.0f} versions, and producers stop for it",
            "training is the bottleneck: more groups per step, or fewer producers",
        )


def effective_sample_low(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    share = _of_trainer(view, "effective_sample_share")
    if share is not None and share < limits.effective_sample_share:
        cure = "too far off-policy: lower pipeline.max_staleness (or `auto`), or the learning rate"
        yield f"the effective sample size is {percent(share)} of the tokens", cure


def completions_truncated(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    share = _of_trainer(view, "truncated_share")
    if share is not None and share > limits.truncated_share:
        cure = "raise sampling.max_completion_length, or punish length (rewards)"
        yield f"{percent(share)} of the completions are cut off at the greatest length", cure


def zero_signal(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    share = _of_trainer(view, "zero_signal_share")
    if share is not None and share > limits.zero_signal_share:
        cure = "an easier or harder mix of prompts; replay.mode: signal fills the batches"
        yield f"{percent(share)} of the groups have nothing to teach, all their rewards are equal", cure


def dead_letters(view: View, limits: Thresholds) -> Iterator[tuple[str, str]]:
    given_up = _of_trainer(view, "dead_letters")
    if view.trainer is None or given_up is None or given_up <= limits.num_dead_letters:
        return
    answered = sum(view.trainer.groups_received.get(outcome, 0) for outcome in ("accepted", "no_signal"))
    share = given_up / (given_up + answered)
    if share > limits.dead_letter_share:
        yield (
            f"{percent(share)} of the prompts were given up, {given_up:.0f}",
            "rl-journal quarantine says which and why",
        )


def connections_refused(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    for reason, count in view.trainer.connections_refused.items() if view.trainer else ():
        if count:
            what = (
                f"{count} {_plural(count, 'connection')} refused since the trainer's start: {reason.replace('_', ' ')}"
            )
            yield what, "its log says whose; `rl-keys authorize` lets a key in"


def frames_refused(view: View, _: Thresholds) -> Iterator[tuple[str, str]]:
    if count := _of_trainer(view, "frames_refused"):
        text = f"{count:.0f} {_plural(count, 'frame')} that came in {'was' if count == 1 else 'were'} no message"
        yield text, "something else talks to the endpoint; rl-journal quarantine shows them"


def _of_trainer(view: View, field: str) -> float | None:
    return None if view.trainer is None else getattr(view.trainer, field)


def _idle_shares(view: View) -> list[float]:
    return [producer.idle_share for producer in view.producers if producer.idle_share is not None]


def _plural(count: float, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


RULES: tuple[Rule, ...] = (
    nothing_answers,
    daemon_gone,
    not_ready,
    nonfinite_steps,
    no_progress,
    disk_nearly_full,
    swaps_refused,
    heartbeat_stale,
    trainer_starved,
    producer_idle,
    staleness_at_bound,
    effective_sample_low,
    completions_truncated,
    zero_signal,
    dead_letters,
    connections_refused,
    frames_refused,
)
