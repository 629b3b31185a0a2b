"""The state of a run in three sentences: how far it is, whether it learns, and what is in its way.

Guarantee: pure; a sentence says only what is known.
"""

from collections.abc import Sequence

from slipstream.status.reading import TrainerView, View
from slipstream.status.warnings import Warned
from slipstream.tables import clock, duration, percent

_FEW = 8  # steps whose mean is compared; fewer say little


def sentences(view: View, warned: Sequence[Warned]) -> list[str]:
    """Return progress, learning and trouble, each as one sentence."""
    return [_progress(view), _learning(view), _trouble(view, warned)]


def _progress(view: View) -> str:
    trainer = view.trainer
    if view.ended:
        return f"The run {view.ended.text}, {clock(view.ended.at)}."
    if not view.answers or trainer is None or trainer.step is None:
        return f"The last step that it told of is {max(view.rewards):,}." if view.rewards else "There is no step yet."
    of = f" of {trainer.max_steps:,}" if trainer.max_steps else ""
    left = f", with about {duration(trainer.eta_s)} left" if trainer.eta_s else ""
    return f"The run is at step {trainer.step:,}{of}{left}."


def _learning(view: View) -> str:
    held_out = _held_out(view.trainer)
    values = list(view.rewards.values())
    gain = view.trainer.teacher_logprob_gain if view.trainer else None
    if not values and gain is not None:
        return f"Its tokens are {abs(gain):.3f} nats {'more' if gain > 0 else 'less'} likely to its teachers than to itself."
    if not values:
        return f"There is no reward yet{held_out}."
    if len(values) < 2 * _FEW:
        return f"Its reward is {values[-1]:.3f}, after too few steps to say more{held_out}."
    first, last = (sum(part) / _FEW for part in (values[:_FEW], values[-_FEW:]))
    held_out = _by_source(view.trainer) + held_out
    way = "rose" if last > first else "fell" if last < first else "stayed"
    of = f"steps {min(view.rewards):,} to {max(view.rewards):,}"
    return f"Its reward {way} from {first:.3f} to {last:.3f} over {of} (means of {_FEW}){held_out}."


def _by_source(trainer: TrainerView | None) -> str:
    found = trainer.source_reward if trainer else {}
    if len(found) < 2:
        return ""
    best, worst = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    return f"; of its sources {best} has most, {found[best]:.3f}, and {worst} least, {found[worst]:.3f}"


def _held_out(trainer: TrainerView | None) -> str:
    if trainer is None or trainer.evaluation_score is None:
        return ""
    best = "" if trainer.evaluation_best_score is None else f", at best {trainer.evaluation_best_score:.3f}"
    return f"; held out it scores {trainer.evaluation_score:.3f}{best}"


def _trouble(view: View, warned: Sequence[Warned]) -> str:
    if warned:
        more = f", the first of {len(warned)} warnings" if len(warned) > 1 else ""
        return f"{warned[0].text[:1].upper()}{warned[0].text[1:]}{more}: {warned[0].cure}."
    share = view.trainer.wait_share if view.trainer else None
    waits = "" if share is None else f"; the trainer waits {percent(share)} of the time"
    return f"There is nothing to warn of{waits}."
