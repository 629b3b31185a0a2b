"""How long the run stood still after a kill.

Guarantee: a recovery is measured from the start of the new process to the first step or acknowledgement that it took part
in. One that the next kill or stop of the same process cut short has no such moment, and is None.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise


def recoveries(
    restarts: Iterable[tuple[str, str, float]], signs: Mapping[str, Sequence[float]]
) -> dict[str, list[float | None]]:
    """Seconds of every recovery, by daemon, from `Tally.restarts` and the times of signs of life. The first start is none."""
    starts: dict[str, list[float]] = defaultdict(list)
    for name, _, when in restarts:
        starts[name].append(when)
    return {
        name: [
            min((sign - start for sign in signs.get(name, ()) if start < sign < until), default=None)
            for start, until in pairwise([*times[1:], float("inf")])
        ]
        for name, times in starts.items()
    }
