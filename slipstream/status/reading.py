"""Computes the numbers of the view from the status documents of the daemons.

Guarantee: pure; a number that no document has is None. A rate is computed from the looks at one process. If these span less
than `SHORTEST_S`, or no total has grown between them, it is over the life of that process; `over_s` says how long that is. So a
restart, which sets totals back, spoils no rate.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict

from protocol.runtime.metrics import Status
from slipstream.run_reader import Ended
from slipstream.status.daemons import Answer


class TrainerView(Struct, frozen=True, kw_only=True):
    """The trainer. A field has its name in the status document, or gives that name."""

    address: str | None = None
    daemon: str | None = None
    error: str | None = None
    not_ready: dict[str, str] = {}
    run: str | None = None
    release: str | None = None
    rates_over_s: float | None = None
    rates_since_start: bool | None = None
    step: int | None = None
    max_steps: int | None = None
    epoch: int | None = None
    policy_version: int | None = None
    gpu_turn: dict[str, int] = {}  # 1 for whose turn it is; all 0 where the GPU is not shared
    gpu_turn_age_s: float | None = field(name="gpu_turn_age_seconds", default=None)
    gpu_turn_s: dict[str, float] = field(name="gpu_turn_seconds", default_factory=dict)
    since_last_step_s: float | None = None
    step_pace_s: float | None = None
    eta_s: float | None = None
    wait_share: float | None = None
    waiting_now_s: float | None = field(name="waiting_seconds", default=None)
    tokens_generated_per_s: float | None = None
    tokens_trained_per_s: float | None = None
    reward: float | None = None
    reward_std: float | None = None
    rewards_by_function: dict[str, float] = field(name="reward_by_function", default_factory=dict)
    dead_rewards: dict[str, float] = field(name="reward_dead_groups", default_factory=dict)  # 0: it works
    teacher_logprob_gain: float | None = field(name="teacher_logprob_gain_nats", default=None)
    zero_signal_share: float | None = field(name="zero_signal_ratio", default=None)
    truncated_share: float | None = field(name="completions_truncated_ratio", default=None)
    completion_length_mean: float | None = field(name="completion_length_mean_tokens", default=None)
    effective_sample_share: float | None = field(name="effective_sample_ratio", default=None)
    sampling_kl: float | None = field(name="sampling_kl_nats", default=None)
    entropy: float | None = field(name="entropy_nats", default=None)
    loss: float | None = None
    gradient_norm: float | None = None
    nonfinite_steps: int | None = None
    staleness_mean: float | None = field(name="staleness_mean_versions", default=None)
    staleness_max: int | None = field(name="staleness_max_versions", default=None)
    max_staleness: int | None = field(name="max_staleness_versions", default=None)
    producers_connected: int | None = None
    leases_out: int | None = None
    groups_ready: int | None = None
    groups_replayable: int | None = None
    rerolls_waiting: int | None = None
    groups_received: dict[str, int] = {}
    leases_failed: dict[str, int] = {}
    connections_refused: dict[str, int] = {}
    groups_trained: int | None = None
    groups_went_stale: int | None = None
    groups_quarantined: int | None = None
    dead_letters: int | None = None
    prompts_differ: int | None = None
    frames_refused: int | None = None
    journal_bytes: int | None = None
    journal_commit_s: float | None = None
    disk_used_share: float | None = field(name="disk_used_ratio", default=None)
    disk_limit_share: float | None = field(name="disk_used_limit_ratio", default=None)
    evaluation_score: float | None = None
    evaluation_best_score: float | None = None
    evaluation_version: int | None = None
    evaluation_prompts: int | None = None
    evaluation_prompts_done: int | None = None
    evaluations: dict[str, int] = {}
    source_groups: dict[str, dict[str, int]] = {}  # by source and outcome; empty for one source, as those below
    source_reward: dict[str, float] = {}
    source_success_share: dict[str, float] = field(name="source_success_ratio", default_factory=dict)
    source_batch_share: dict[str, float] = field(name="source_batch_ratio", default_factory=dict)
    source_length_mean: dict[str, float] = field(name="source_completion_length_mean_tokens", default_factory=dict)
    source_generation_s: dict[str, float] = field(name="source_generation_seconds", default_factory=dict)
    evaluation_source_score: dict[str, float] = {}
    environment_groups: dict[str, dict[str, int]] = {}  # by environment and outcome; empty for one, as those below
    environment_reward: dict[str, float] = {}
    environment_success_share: dict[str, float] = field(name="environment_success_ratio", default_factory=dict)
    environment_leases: dict[str, int] = {}
    environment_skipped: dict[str, int] = {}  # 1 for one that the run goes on without
    rank_step_s: dict[str, float] = field(name="rank_step_seconds", default_factory=dict)  # empty for one rank
    rank_waiting_s: dict[str, float] = field(name="rank_waiting_seconds", default_factory=dict)
    rank_tokens: dict[str, int] = {}
    rank_memory_bytes: dict[str, int] = {}

    @property
    def gpu_side(self) -> str | None:
        """Whose turn it is on the GPU that both sides share; None where they do not."""
        return next((side for side, has_it in self.gpu_turn.items() if has_it), None)


class ProducerView(Struct, frozen=True, kw_only=True):
    """A producer, by its own document and the trainer's."""

    name: str
    address: str | None = None  # None if only the trainer knows it
    error: str | None = None
    not_ready: dict[str, str] = {}
    release: str | None = None
    rates_over_s: float | None = None
    rates_since_start: bool | None = None
    connected: bool | None = None  # by its own document or, if it does not answer, the trainer's
    policy_version: int | None = None
    lag: int | None = None  # versions by which it is behind the newest
    refused_version: int | None = None  # that it refuses to serve; -1 if there is none
    heard_s: float | None = None  # since the trainer heard from it
    leases: dict[str, int] = {}  # that it holds, by stage; only `held` if the trainer alone knows them
    paused: bool | None = None
    idle_share: float | None = None
    tokens_per_s: float | None = None
    sequences_per_step: float | None = None  # of the engine, as the next two
    tokens_per_step: float | None = None
    graph_share: float | None = None  # of the steps; None where there are no CUDA graphs
    swaps: dict[str, int] = {}
    swap_mean_s: float | None = None
    swap_last_s: float | None = None
    teacher_failed_shares: dict[str, float] = {}  # of the completions, by teacher


class View(Struct, frozen=True, kw_only=True):
    at: float  # Unix time
    trainer: TrainerView | None
    producers: list[ProducerView]
    silent: dict[str, str]  # unknown addresses, and why they do not answer
    rewards: dict[int, float] = {}  # mean ones of the last steps, by step
    ended: Ended | None = None  # if no daemon answers, because the trainer has ended by itself

    @property
    def answers(self) -> bool:
        """Return whether any daemon answers."""
        daemons = (self.trainer, *self.producers)
        return any(daemon is not None and daemon.address is not None and daemon.error is None for daemon in daemons)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "answers": self.answers,
            "trainer": self.trainer and asdict(self.trainer),
            "producers": [asdict(producer) for producer in self.producers],
            "ended": self.ended and self.ended._asdict(),
            "rewards": [{"step": step, "reward": reward} for step, reward in self.rewards.items()],
        }


SHORTEST_S = 10.0
_TRAINER_CLOCK = ("wait_seconds", "step_seconds_sum")
_PRODUCER_CLOCK = ("idle_seconds", "busy_seconds")
_FIRST_STEPS, _LATE_S, _LATE_PACES = 3, 10.0, 5.0

Daemon = TypeVar("Daemon", TrainerView, ProducerView)


def read(looks: Sequence[Sequence[Answer]]) -> View:
    """Return the view from the answers of all daemons, asked several times, oldest first."""
    newest = looks[-1]
    trainers = [answer for answer in newest if answer.job == "rl-trainer"]
    trainer = min(trainers, key=lambda answer: answer.error is not None, default=None)
    trainer_says = trainer.status if trainer else None
    found = [_producer(answer, _said(looks, answer), trainer_says) for answer in newest if answer.job == "rl-producer"]
    producers = {producer.name: producer for producer in found}
    for name in _by_label(trainer_says, "producer_policy_version"):
        if name not in producers:
            producers[name] = ProducerView(name=name, connected=True, **_known_to(trainer_says, name))
    return View(
        at=max((answer.at for answer in newest), default=0.0),
        trainer=None if trainer is None else _trainer(trainer, _said(looks, trainer)),
        producers=[producers[name] for name in sorted(producers)],
        silent={answer.source.address: answer.error or "" for answer in newest if answer.job is None},
    )


def _said(looks: Sequence[Sequence[Answer]], daemon: Answer) -> list[Status]:
    found = [answer for answers in looks for answer in answers if answer.source == daemon.source]
    return [answer.status for answer in found if answer.status is not None]


def _trainer(answer: Answer, said: list[Status]) -> TrainerView:
    now = answer.status
    identity: dict[str, Any] = {"address": answer.source.address, "daemon": answer.source.daemon}
    if now is None:
        return TrainerView(**identity, error=answer.error)
    rates = Rates(said, _TRAINER_CLOCK)
    pace_s = rates.clock_per("step_seconds_count")
    last_step_at = number(now, "last_step_timestamp_seconds")
    since_s = max(0.0, now.at - last_step_at) if last_step_at else None
    computed = {
        "daemon": now.daemon,
        "rates_over_s": rates.over_s,
        "rates_since_start": rates.since_start,
        "since_last_step_s": since_s,
        "step_pace_s": pace_s,
        "eta_s": _eta_s(number(now, "step"), number(now, "max_steps"), pace_s, since_s),
        "wait_share": rates.share("wait_seconds"),
        "tokens_generated_per_s": rates.per_second("tokens_generated"),
        "tokens_trained_per_s": rates.per_second("tokens_trained"),
        "journal_commit_s": rates.mean("journal_commit_seconds"),
    }
    return _view(TrainerView, now, identity, computed)


def _eta_s(step: float | None, max_steps: float | None, pace_s: float | None, since_s: float | None) -> float | None:
    """The time left at the pace of now; None after the first two steps, and while steps are late."""
    if step is None or max_steps is None or pace_s is None or since_s is None:
        return None
    late = since_s > max(_LATE_S, _LATE_PACES * pace_s)
    return None if late or step < _FIRST_STEPS else max(0, max_steps - step) * pace_s


def _producer(answer: Answer, said: list[Status], trainer: Status | None) -> ProducerView:
    now = answer.status
    name = (now.info.get("producer") if now else None) or answer.source.daemon or answer.source.address
    identity: dict[str, Any] = {"name": name, "address": answer.source.address}
    known = _known_to(trainer, name)
    if now is None:
        return ProducerView(**identity, error=answer.error, **known)
    rates = Rates(said, _PRODUCER_CLOCK)
    connected, version, newest = (
        number(*of) for of in ((now, "connected"), (now, "policy_version"), (trainer, "policy_version"))
    )
    computed = known | {
        "policy_version": version,
        "lag": None if newest is None or version is None or version < 0 else max(0, newest - version),
        "leases": _by_label(now, "leases"),
        "rates_over_s": rates.over_s,
        "rates_since_start": rates.since_start,
        "connected": None if connected is None else bool(connected),
        "paused": bool(number(now, "paused")),
        "idle_share": rates.share("idle_seconds"),
        "tokens_per_s": rates.per_second("completion_tokens"),
        "sequences_per_step": rates.per("engine_step_sequences", "engine_steps"),
        "tokens_per_step": rates.per("engine_step_tokens", "engine_steps"),
        "graph_share": rates.per("engine_graph_steps", "engine_steps"),
        "swap_mean_s": rates.mean("swap_seconds"),
        "swap_last_s": newest_mean(said, "swap_seconds"),
        "teacher_failed_shares": rates.per_other("teacher_failures", "completions"),
    }
    return _view(ProducerView, now, identity, computed)


def _known_to(trainer: Status | None, producer: str) -> dict[str, Any]:
    """Return the trainer's numbers of a producer; none if it is not connected."""
    of_it = {
        name: _by_label(trainer, f"producer_{name}").get(producer)
        for name in ("policy_version", "lag_versions", "refused_version", "heard_seconds", "leases")
    }
    version = of_it["policy_version"]
    if version is None:
        return {}
    return {
        "policy_version": version,
        "lag": None if version < 0 else of_it["lag_versions"],
        "refused_version": of_it["refused_version"],
        "heard_s": of_it["heard_seconds"],
        "leases": {"held": of_it["leases"] or 0},
    }


def _by_label(status: Status | None, name: str) -> dict[str, float]:
    """A number with one label; empty if the daemon does not say it."""
    found = status.numbers.get(name) if status else None
    return (
        {label: value for label, value in found.items() if isinstance(value, int | float)}
        if isinstance(found, dict)
        else {}
    )


def _view(kind: type[Daemon], status: Status, identity: dict[str, Any], computed: dict[str, Any]) -> Daemon:
    """The daemon's own numbers, under the names that the fields of `kind` give them, with what was computed from them."""
    values = {"not_ready": status.not_ready} | status.numbers | status.info | identity | computed
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        return kind(**identity, error=f"its status document cannot be read: {error}")


class Rates:
    """The rates of one daemon, from its documents, oldest first, the last one of now. The totals in `clock`, in seconds, grow
    all the time while it works, and so say how long it has worked."""

    def __init__(self, said: Sequence[Status], clock: Sequence[str]) -> None:
        self._now, self._clock = said[-1], clock
        self._before: Status | None = next(status for status in said if status.started == self._now.started)
        self._span_s = self._now.at - self._before.at
        if self._span_s < SHORTEST_S or not self._worked_s():
            self._before = None

    @property
    def since_start(self) -> bool:
        """Return whether the rates are over the whole life of the process."""
        return self._before is None

    @property
    def over_s(self) -> float:
        return self._worked_s() if self._before is None else self._span_s

    def per_second(self, name: str) -> float | None:
        return _ratio(self._increase(name), self.over_s)

    def share(self, name: str) -> float | None:
        return _ratio(self._increase(name), self._worked_s())

    def per(self, name: str, other: str) -> float | None:
        return _ratio(self._increase(name), self._increase(other))

    def mean(self, histogram: str) -> float | None:
        return self.per(f"{histogram}_sum", f"{histogram}_count")

    def clock_per(self, name: str) -> float | None:
        """Seconds of work by which a total grows by one."""
        return _ratio(self._worked_s(), self._increase(name))

    def per_other(self, name: str, other: str) -> dict[str, float]:
        """Return by label how much totals have grown for each by which another has; empty if that has not grown."""
        grown, before = self._increase(other), _by_label(self._before, name)
        if not grown:
            return {}
        return {label: (value - before.get(label, 0.0)) / grown for label, value in _by_label(self._now, name).items()}

    def _worked_s(self) -> float:
        return sum(self._increase(name) or 0.0 for name in self._clock)

    def _increase(self, name: str) -> float | None:
        now = number(self._now, name)
        return now if now is None or self._before is None else now - (number(self._before, name) or 0.0)


def newest_mean(said: Sequence[Status], histogram: str) -> float | None:
    """Return the newest observation of a histogram: the mean between the two newest looks between which it observed anything."""
    for before, after in reversed(list(pairwise(said))):
        if before.started == after.started:
            amount, count = (
                (number(after, name) or 0.0) - (number(before, name) or 0.0)
                for name in (f"{histogram}_sum", f"{histogram}_count")
            )
            if count:
                return amount / count
    return None


def number(status: Status | None, name: str) -> float | None:
    """A number of the document; None if the daemon does not say it."""
    found = status.numbers.get(name) if status else None
    return None if isinstance(found, dict) else found


def _ratio(amount: float | None, count: float | None) -> float | None:
    return None if amount is None or not count else amount / count
