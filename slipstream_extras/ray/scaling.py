"""The number of producers that a run should have, decided from its measured load.

Guarantee: the number stays within its bounds, moves by one, and does not oscillate. A producer is added while the trainer waits
for rollouts and no producer is idle, and taken away only if those that stay would still have time to spare. A condition has to
hold for one window of measuring; after a change nothing happens for two, twice as long for every time that the direction turned.

Why it does not: with n equal producers, each busy for a share b, n - 1 would be busy for b * n / (n - 1). One is
taken away if that is at most `BUSY_ENOUGH`, so the trainer will not wait for those that stay, and none is added for that.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.run_reader import DaemonAddress
from slipstream.status.daemons import Answer
from slipstream.status.reading import View, read
from slipstream_extras.ray.plan import TRAINER, DaemonReport

WAITS, IDLES_AT_MOST = 0.10, 0.10
WAITS_AT_MOST, BUSY_ENOUGH = 0.08, 0.85
HOLDS, SETTLES = 1.0, 2.0  # windows
LONGEST_SETTLE_S = 7200.0


class Load(NamedTuple):
    """The load that was measured over the last seconds.

    Args:
        at: seconds of any clock that never goes back.
        window_s: over which shares are measured.
        producers: that work.
        wait: share of its time in which the trainer waited for rollouts; None: not known.
        idle: mean share of their time in which producers had nothing to do; None: not known.
        room: whether one more producer would fit.
    """

    at: float
    window_s: float
    producers: int
    wait: float | None
    idle: float | None
    room: bool


class History(NamedTuple):
    """The decisions so far, as far as the next one depends on them."""

    direction: int = 0  # of the condition that holds now
    holds_since: float = 0.0
    changed_at: float | None = None
    last_direction: int = 0
    turns: int = 0


class Decision(NamedTuple):
    change: int  # -1, 0 or 1
    why: str
    history: History


def decide(load: Load, history: History, least: int, most: int) -> Decision:
    """
    Args:
        least, most: bounds of the number of producers.
    """
    direction, why = _direction(load, least, most)
    if direction != history.direction:
        history = history._replace(direction=direction, holds_since=load.at)
    if not direction or load.at - history.holds_since < HOLDS * load.window_s or _settles(load, history):
        return Decision(0, why, history)
    turns = history.turns + (direction == -history.last_direction)
    changed = History(changed_at=load.at, last_direction=direction, turns=turns)
    return Decision(direction, why, changed)


def _direction(load: Load, least: int, most: int) -> tuple[int, str]:
    if load.wait is None or load.idle is None or not load.producers:
        return 0, "nothing is measured yet"
    busy_then = (1 - load.idle) * load.producers / (load.producers - 1) if load.producers > 1 else 1.0
    measured = (
        f"the trainer waits {load.wait:.0%} of its time for rollouts, {load.producers} producers idle {load.idle:.0%}"
    )
    if load.wait >= WAITS and load.idle <= IDLES_AT_MOST:
        if load.producers >= most:
            return 0, f"{measured}; producers.max is {most}"
        return (1, measured) if load.room else (0, f"{measured}; nothing is free for one more")
    if load.wait <= WAITS_AT_MOST and busy_then <= BUSY_ENOUGH and load.producers > least:
        return -1, f"{measured}, {load.producers - 1} would be busy {busy_then:.0%}"
    return 0, measured


def _settles(load: Load, history: History) -> bool:
    if history.changed_at is None:
        return False
    wait_s = min(LONGEST_SETTLE_S, SETTLES * load.window_s * 2.0 ** min(history.turns, 16))
    return load.at - history.changed_at < wait_s


SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 60.0, 3600.0
_STEPS = 5
_LOOKS = 20


class Looks:
    """The last looks at the daemons of a run."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Sequence[Answer]]] = deque()
        self._window_s = SHORTEST_WINDOW_S

    def add(self, at: float, answers: Sequence[Answer]) -> None:
        """`at` is a time of a clock that never goes back."""
        if len(self._kept) > 1 and self._kept[-1][0] - self._kept[-2][0] < self._window_s / _LOOKS:
            self._kept.pop()
        self._kept.append((at, answers))
        while at - self._kept[0][0] > self._window_s:
            self._kept.popleft()

    def load(self, wanted: int, room: bool) -> Load:
        """
        Args:
            wanted: producers that there should be.
            room: whether one more would fit.
        """
        view = read([answers for _, answers in self._kept])
        pace_s = view.trainer.step_pace_s if view.trainer else None
        self._window_s = min(LONGEST_WINDOW_S, max(SHORTEST_WINDOW_S, _STEPS * (pace_s or 0.0)))
        idle = [
            producer.idle_share
            for producer in view.producers
            if producer.idle_share is not None and producer.connected and producer.rates_since_start is False
        ]
        mean = sum(idle) / len(idle) if idle else None
        return Load(self._kept[-1][0], self._window_s, len(idle), self._wait(view), mean, room and len(idle) >= wanted)

    def _wait(self, view: View) -> float | None:
        """The share of its time that the trainer waits."""
        trainer = view.trainer
        if trainer is None or trainer.error is not None:
            return None
        if (trainer.waiting_now_s or 0) >= self._window_s:  # a wait is counted when it ends
            return 1.0
        return trainer.wait_share if trainer.rates_since_start is False else None


def answers(reports: Sequence[DaemonReport], at: float) -> list[Answer]:
    """Return the reports as `slipstream status` gets them from the daemons' addresses."""
    return [
        Answer(
            DaemonAddress(report.node or "?", "rl-trainer" if report.name == TRAINER else "rl-producer", report.name),
            at,
            report.status,
            None if report.status else report.message or report.phase,
        )
        for report in reports
    ]
