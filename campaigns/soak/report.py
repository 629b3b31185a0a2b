"""From samples to a verdict.

Guarantee: a number fails only where the lower end of its interval is above its bound; what was too short to be judged is named as
such and never counts as fine. Every lifetime is judged by itself, from the end of its own warm-up on.

Memory comes in pages, and Python asks for them by the arena. Growth of less than one arena in all that was watched cannot be
told from an arena that was begun, however steady it is; of bounds that are lower than that a longer soak can tell more.
"""

import math
from dataclasses import dataclass
from typing import Any

from campaigns.soak.load import Record
from campaigns.soak.samples import GROUPS, MEMORY, Lifetime
from campaigns.soak.slopes import slope

_HOUR_S = 3600.0
_PER_GROUPS = 1000.0
ARENA = float(2**20)  # of CPython's allocator, in bytes
COUNTS = ("descriptors", "threads", "processes", "files_in_shared_memory", "files")
NEEDED = (
    "asked: whole",
    "asked: stream",
    "agent: did its task",
    "started: agents: trainer",
    "started: evaluated: visitor",
    "evaluations",
    "steps of evaluated",
    "steps of agents",
)
"""What a soak has to have done to say anything."""


@dataclass(frozen=True)
class Bounds:
    """What the lower end of an interval may not exceed."""

    memory_per_hour: float = 5e6
    memory_per_1000_groups: float = 5e3
    counts_per_hour: float = 0.0


DEFAULT_BOUNDS = Bounds()


def summarize(record: Record, *, warm_up_s: float, bounds: Bounds = DEFAULT_BOUNDS) -> dict[str, Any]:
    rows = [row for lifetime in [*record.daemons, *record.runs] for row in _judged(lifetime, warm_up_s, bounds)]
    grows = [row for row in rows if row["grows"]]
    problems = [f"{row['name']}: {row['kind']}, per {row['per']}, grows by at least {row['low']:,.4g}" for row in grows]
    problems += [f"left behind: {what}" for what in record.left]
    problems += [f"there was no load: {what}" for what in NEEDED if record.did[what] == 0]
    return {
        "ok": not problems,
        "problems": problems,
        "warm_up_s": warm_up_s,
        "did": dict(sorted(record.did.items())),
        "too_short": [each.name for each in record.daemons if not _judged(each, warm_up_s, bounds)],
        "slopes": rows,
    }


def _judged(lifetime: Lifetime, warm_up_s: float, bounds: Bounds) -> list[dict[str, Any]]:
    """One row per number and what it may grow with; none if the lifetime was too short."""
    warm = [at_s - lifetime.started_at >= warm_up_s for at_s in lifetime.at_s]
    hours = [
        (at_s - lifetime.started_at) / _HOUR_S for at_s, is_warm in zip(lifetime.at_s, warm, strict=True) if is_warm
    ]
    values = {
        kind: [value for value, is_warm in zip(series, warm, strict=True) if is_warm]
        for kind, series in lifetime.values.items()
    }
    groups = values.pop(GROUPS, [])
    rows = []
    for kind, series in values.items():
        bound = bounds.memory_per_hour if kind == MEMORY else bounds.counts_per_hour if kind in COUNTS else math.inf
        rows.append(_row(lifetime, kind, "hour", hours, series, bound))
        if kind == MEMORY:
            pairs = [pair for pair in zip(groups, series, strict=True) if not math.isnan(pair[0])]
            thousands, seen = [pair[0] / _PER_GROUPS for pair in pairs], [pair[1] for pair in pairs]
            rows.append(_row(lifetime, kind, "1000 groups", thousands, seen, bounds.memory_per_1000_groups))
    return [row for row in rows if row is not None]


def _row(
    lifetime: Lifetime, kind: str, per: str, x: list[float], series: list[float], bound: float
) -> dict[str, Any] | None:
    found = slope(x, series)
    if found is None:
        return None
    is_visible = kind != MEMORY or found.low * (x[-1] - x[0]) >= ARENA
    return {
        "name": lifetime.name,
        "kind": kind,
        "per": per,
        **{name: round(value, 3) for name, value in found._asdict().items()},
        "first": series[0],
        "last": series[-1],
        "grows": found.low > bound and is_visible,
    }
