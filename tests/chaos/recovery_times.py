"""How long the run stood still after a kill.

Guarantee: a recovery is measured from the start of the new process to the first step or acknowledgement that it took part
in. One that the next kill or stop of the same process cut short has no such moment, and is counted apart.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Recoveries(NamedTuple):
    seconds: list[float]
    cut_short: int


def recoveries(starts: Sequence[float], signs: Iterable[float]) -> Recoveries:
    """Of one daemon: when its processes were started, and when there was a sign of life. The first start is none."""
    ordered = sorted(signs)
    seconds, cut_short = [], 0
    for index, start in enumerate(starts):
        if index == 0:
            continue
        until = starts[index + 1] if index + 1 < len(starts) else float("inf")
        place = bisect_right(ordered, start)
        if place < len(ordered) and ordered[place] < until:
            seconds.append(ordered[place] - start)
        else:
            cut_short += 1
    return Recoveries(seconds, cut_short)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that so large a share of all does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)], 3)


def by_daemon(
    restarts: Iterable[tuple[str, str, float]], signs: Mapping[str, Sequence[float]]
) -> dict[str, Recoveries]:
    """For each daemon's name, from `Tally.restarts` and the times of its signs of life."""
    starts: dict[str, list[float]] = defaultdict(list)
    for name, _, when in restarts:
        starts[name].append(when)
    return {name: recoveries(times, signs.get(name, ())) for name, times in starts.items()}
