"""The rates at which the totals of one daemon grow.

Guarantee: a rate is computed from the looks at one process. If these span less than `SHORTEST_S`, or no total has grown between
them, it is over the life of that process; `over_s` says how long that is. So a restart, which sets totals back, spoils no rate.
"""

from collections.abc import Sequence
from itertools import pairwise

from protocol.service.status import Status

SHORTEST_S = 10.0


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
        """Whether they are over the whole life of the process."""
        return self._before is None

    @property
    def over_s(self) -> float:
        return self._worked_s() if self._before is None else self._span_s

    def per_second(self, name: str) -> float | None:
        return _ratio(self._increase(name), self.over_s)

    def share(self, name: str) -> float | None:
        return _ratio(self._increase(name), self._worked_s())

    def mean(self, histogram: str) -> float | None:
        return _ratio(self._increase(f"{histogram}_sum"), self._increase(f"{histogram}_count"))

    def clock_per(self, name: str) -> float | None:
        """Seconds of work by which a total grows by one."""
        return _ratio(self._worked_s(), self._increase(name))

    def _worked_s(self) -> float:
        return sum(self._increase(name) or 0.0 for name in self._clock)

    def _increase(self, name: str) -> float | None:
        now = number(self._now, name)
        return now if now is None or self._before is None else now - (number(self._before, name) or 0.0)


def newest_mean(said: Sequence[Status], histogram: str) -> float | None:
    """What the histogram observed last: the mean between the two newest looks between which it observed anything."""
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
