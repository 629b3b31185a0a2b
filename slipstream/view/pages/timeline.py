"""What the daemons did at the same time, as lanes on one axis.

Guarantee: pure; a lane has one number for each of `BINS` parts of the time that is shown: the share of that part in which the
daemon did this. So a picture of any length has the same size.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

BINS = 1_200
MOST_PRODUCERS = 12
_GAP_S = 10.0  # a producer says its totals every second; with a longer gap it was away


class Segment(NamedTuple):
    start: float  # Unix time
    end: float
    share: float = 1.0  # of that time


class Lane(NamedTuple):
    name: str
    kind: str  # training, waiting, generation, scoring or swap
    shares: list[float]  # of each part, 0 to 1


def lanes(
    steps: Iterable[dict[str, Any]],
    producers: dict[str, list[dict[str, Any]]],
    scoring: Iterable[tuple[float, float]],
    start: float,
    end: float,
) -> list[Lane]:
    """`steps` are lines of `steps.jsonl`, `producers` the lines of each timeline by its name, `scoring` the moments at which
    groups arrived, each with the seconds for which it was scored."""
    trained, waited = _trainer(steps)
    found = [("trainer trains", "training", trained), ("trainer waits", "waiting", waited)]
    found.append(("rewards", "scoring", [Segment(at - seconds, at) for at, seconds in scoring if seconds]))
    for name, events in list(producers.items())[:MOST_PRODUCERS]:
        found.append((f"{name} generates", "generation", _generation(events)))
        found.append((f"{name} swaps", "swap", _swaps(events)))
    return [Lane(name, kind, coverage(segments, start, end)) for name, kind, segments in found]


def coverage(segments: Iterable[Segment], start: float, end: float, bins: int = BINS) -> list[float]:
    """The share of each of `bins` equal parts of `start` to `end` that the segments take, at most 1."""
    shares = [0.0] * bins
    width = (end - start) / bins
    for segment in segments:
        low, high = max(segment.start, start), min(segment.end, end)
        if high <= low or width <= 0:
            continue
        first, last = int((low - start) / width), min(bins - 1, int((high - start) / width))
        for index in range(first, last + 1):
            begins = start + index * width
            inside = min(high, begins + width) - max(low, begins)
            shares[index] += max(0.0, inside) / width * segment.share
    return [min(1.0, share) for share in shares]


def span_of(steps: Iterable[dict[str, Any]], producers: dict[str, list[dict[str, Any]]]) -> tuple[float, float] | None:
    """From the first to the last moment of which anything is known."""
    times = [segment.start for part in _trainer(steps) for segment in part]
    times += [line["t"] for line in steps if _is_number(line.get("t"))]
    times += [event["t"] for events in producers.values() for event in events if _is_number(event.get("t"))]
    return (min(times), max(times)) if times else None


def _trainer(steps: Iterable[dict[str, Any]]) -> tuple[list[Segment], list[Segment]]:
    trained, waited = [], []
    for line in steps:
        at, step_s, wait_s = (line.get(name) for name in ("t", "step_s", "wait_s"))
        if _is_number(at) and _is_number(step_s) and _is_number(wait_s):
            trained.append(Segment(at - step_s, at))
            waited.append(Segment(at - step_s - wait_s, at - step_s))
    return trained, waited


def _generation(events: Iterable[dict[str, Any]]) -> list[Segment]:
    """Between two totals the engine was busy for the difference of both."""
    found = []
    before: tuple[float, float] | None = None
    for event in events:
        at, busy_s = event.get("t"), event.get("busy_s")
        if event.get("event") == "start" or not (_is_number(at) and _is_number(busy_s)):
            before = None if event.get("event") == "start" else before
            continue
        if before is not None and 0 < at - before[0] <= _GAP_S and busy_s >= before[1]:
            found.append(Segment(before[0], at, min(1.0, (busy_s - before[1]) / (at - before[0]))))
        before = at, busy_s
    return found


def _swaps(events: Iterable[dict[str, Any]]) -> list[Segment]:
    return [
        Segment(event["t"] - event["ms"] / 1000, event["t"])
        for event in events
        if event.get("event") == "swap" and _is_number(event.get("t")) and _is_number(event.get("ms"))
    ]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
