"""From the status documents of a run's daemons to the load that scaling decides on.

Guarantee: shares are over a window of a minute, or of five steps of the trainer if these take longer; one that has not been
measured over at least ten seconds is None. However long the window, some twenty looks are kept.
"""

from collections import deque
from collections.abc import Sequence

from slipstream.cluster.fleet.plan import TRAINER, DaemonReport
from slipstream.cluster.fleet.scaling import Load
from slipstream.run_reader import DaemonAddress
from slipstream.status.daemons import Answer
from slipstream.status.reading import read
from slipstream.status.view import View

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
    """As `slipstream status` would have got them from the daemons' addresses."""
    return [
        Answer(
            DaemonAddress(report.node or "?", "rl-trainer" if report.name == TRAINER else "rl-producer", report.name),
            at,
            report.status,
            None if report.status else report.message or report.phase,
        )
        for report in reports
    ]
