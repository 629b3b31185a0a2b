"""How fast the totals of one daemon grow.

Guarantee: a rate is over the scrapes of one and the same process, or, while they span less than `SHORTEST_S` or nothing moved
between them, over that process' whole life; `over_s` says how long that is. A restart, which sets totals back, spoils no rate.
"""

from collections.abc import Sequence
from itertools import pairwise

from tools.status.scrape import Answer

SHORTEST_S = 10.0


class Rates:
    """Of one daemon.

    Args:
        answers: what it said, oldest first, the last one now.
        clock: the totals, in seconds, that grow all the time while it works; they say how long it has worked.
    """

    def __init__(self, answers: Sequence[Answer], clock: Sequence[str]) -> None:
        self._now = answers[-1]
        self._clock = clock
        self._before: Answer | None = next((a for a in answers if _same_process(a, self._now)), self._now)
        if self._now.at - self._before.at < SHORTEST_S or not self._worked_s():
            self._before = None

    def _worked_s(self) -> float:
        return sum(self.increase(name) or 0.0 for name in self._clock)

    @property
    def since_start(self) -> bool:
        """Whether they are over the whole life of the process."""
        return self._before is None

    @property
    def over_s(self) -> float:
        return self._worked_s() if self._before is None else self._now.at - self._before.at

    def increase(self, name: str) -> float | None:
        """None if the daemon does not show it."""
        now = self._now.value(name)
        if now is None or self._before is None:
            return now
        return now - (self._before.value(name) or 0.0)

    def per_second(self, name: str) -> float | None:
        increase = self.increase(name)
        return None if increase is None or not self.over_s else increase / self.over_s

    def share(self, name: str) -> float | None:
        """Of one part of the clock."""
        increase, worked_s = self.increase(name), self._worked_s()
        return None if increase is None or not worked_s else increase / worked_s

    def mean(self, histogram: str) -> float | None:
        """Of what a histogram observed."""
        return _ratio(self.increase(f"{histogram}_sum"), self.increase(f"{histogram}_count"))

    def clock_per(self, name: str) -> float | None:
        """Seconds of work by which a total grows by one."""
        return _ratio(self._worked_s(), self.increase(name))


def newest_mean(answers: Sequence[Answer], histogram: str) -> float | None:
    """What the histogram observed last: the mean between the two newest scrapes between which it observed anything."""
    for before, after in reversed(list(pairwise(answers))):
        if _same_process(before, after):
            amount, count = (_difference(before, after, f"{histogram}_{part}") for part in ("sum", "count"))
            if count:
                return amount / count
    return None


def _difference(before: Answer, after: Answer, name: str) -> float:
    return (after.value(name) or 0.0) - (before.value(name) or 0.0)


def _same_process(one: Answer, other: Answer) -> bool:
    name = "process_start_time_seconds"
    return one.value(name) is not None and one.value(name) == other.value(name)


def _ratio(amount: float | None, count: float | None) -> float | None:
    return None if amount is None or not count else amount / count
