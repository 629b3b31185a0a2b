"""Computes the numbers of the view from the status documents of the daemons.

Guarantee: pure; a number that no document has is None.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from protocol.service.status import Status
from tools.status.daemons import Answer
from tools.status.rates import Rates, newest_mean, number
from tools.status.view import ProducerView, TrainerView, View

_TRAINER_CLOCK = ("wait_seconds", "step_seconds_sum")
_PRODUCER_CLOCK = ("idle_seconds", "busy_seconds")
_FIRST_STEPS, _LATE_S, _LATE_PACES = 3, 10.0, 5.0

Daemon = TypeVar("Daemon", TrainerView, ProducerView)


def read(looks: Sequence[Sequence[Answer]]) -> View:
    """The view of what all daemons said at each of the last looks, oldest first."""
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
        "swap_mean_s": rates.mean("swap_seconds"),
        "swap_last_s": newest_mean(said, "swap_seconds"),
    }
    return _view(ProducerView, now, identity, computed)


def _known_to(trainer: Status | None, producer: str) -> dict[str, Any]:
    """What the trainer says of it; nothing if it is not connected."""
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
