"""The curves of a run, as the charts of the browser take them.

Guarantee: pure; a curve has at most `MOST_POINTS`, each the mean of the steps that it stands for. A number that a step does not
have is a gap.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

from replay.sources import SOURCES, total_of

BINS = 1_200
MOST_PRODUCERS = 12
_GAP_S = 10.0  # a producer writes its totals every second; with a longer gap it was away


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
    """Return the first and the last known moment."""
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


MOST_POINTS = 1_000
_RATIO = "sampling/importance_sampling_ratio"


By = Literal["step", "time"]


class Curve(NamedTuple):
    name: str
    values: list[float | None]
    kind: str = "line"


class Chart(NamedTuple):
    title: str
    x: list[float]  # steps, or Unix time
    curves: list[Curve]
    unit: str = ""
    lanes: bool = False  # each curve has a row of its own
    by: By = "time"


_X: dict[By, str] = {"step": "step", "time": "t"}
_COMPARED = {
    "Reward": ("reward", True), "Held-out score": ("score", False), "Entropy, nats per token": ("entropy", True),
    "Length of completions, tokens": ("completions/mean_length", True),
    "Effective sample size, share of the tokens": (f"{_RATIO}/effective_sample_share", True),
    "Seconds of training in a step": ("step_s", True),
}  # fmt: skip
_AGES = ("fresh", "1 version", "2 versions", "3 or more")
_OF_STEPS = {
    "Loss": {"loss": "loss"},
    "Gradient norm, before clipping": {"gradient norm": "grad_norm"},
    "Entropy, nats per token": {"entropy": "entropy"},
    "Effective sample size, share of the tokens": {"before correction": f"{_RATIO}/effective_sample_share",
                                                   "after correction": f"{_RATIO}/corrected/effective_sample_share"},
    "Importance ratio, before correction": {"1st percentile": f"{_RATIO}/p01", "mean": f"{_RATIO}/mean",
                                            "99th percentile": f"{_RATIO}/p99"},
    "Staleness, versions": {"mean": "staleness/mean", "greatest": "staleness/max"},
    "Level of the curriculum": {"level": "curriculum/level"},
    "Success at that level, share of completions": {"success": "curriculum/success_rate"},
    "Seconds of a step": {"waiting": "wait_s", "training": "step_s"},
    "Length of completions, tokens": {"mean": "completions/mean_length", "greatest": "completions/max_length"},
    "Share of what arrived": {"groups without signal": "frac_reward_zero_std",
                              "completions cut off": "completions/clipped_ratio", "replayed": "replay/share"},
}  # fmt: skip

_OF_SOURCES = {
    "Reward by source": "reward",
    "Successes by source, share of the completions": "success_rate",
    "Batch by source, share of the groups": "batch_share",
}


def charts(
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    lanes: list[Lane],
    span: Any,
    by: By = "time",
) -> list[Chart]:
    """`steps` are lines in the order of their steps, `evaluations` those of `evaluations.jsonl`, `lanes` cover `span`."""
    points = binned(_placed(steps))
    x = [point[_X[by]] for point in points]
    found = []
    if x:
        found.append(Chart("Reward", *_with_score(x, points, evaluations, steps, by), by=by))
        speeds = [_speed(point) for point in points]
        found.append(Chart("Tokens trained per second", x, [Curve("tokens/s", speeds)], by=by))
        for title, curves in _OF_STEPS.items():
            shown = [Curve(name, [point.get(key) for point in points]) for name, key in curves.items()]
            found.append(Chart(title, x, [curve for curve in shown if any(v is not None for v in curve.values)], by=by))
        found += [*_by_source(x, points, by), _scores_by_source(steps, evaluations, by)]
    found += [_timeline(lanes, *span)] if span else []
    return [chart for chart in found if chart.curves]


def _by_source(x: list[float], points: Sequence[Mapping[str, float]], by: By) -> Iterator[Chart]:
    """Draw numbers of steps by source; none where there are not several."""
    names = sorted({key.split("/")[1] for point in points for key in point if key.startswith(SOURCES)})
    for title, what in _OF_SOURCES.items():
        values = {name: [point.get(total_of(name, what)) for point in points] for name in names}
        known = [Curve(name, found) for name, found in values.items() if any(value is not None for value in found)]
        yield Chart(title, x, known, by=by)


def _scores_by_source(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], by: By) -> Chart:
    """Draw held-out scores by source, at the steps whose policies they are of."""
    places = {line["step"]: line[_X[by]] for line in _placed(steps)}
    known = [line for line in evaluations if line.get("step") in places and isinstance(line.get("sources"), dict)]
    names = sorted({name for line in known for name in line["sources"]})
    curves = [Curve(name, [line["sources"].get(name, {}).get("score") for line in known], "points") for name in names]
    return Chart("Held-out score by source", [places[line["step"]] for line in known], curves, by=by)


def compared(
    runs: Mapping[str, tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]],
) -> list[Chart]:
    """Draw the same curves of several runs by step, each chart with one of each run.

    Args:
        runs: lines of `steps.jsonl` and of `evaluations.jsonl`, by the name of the run.
    """
    found = []
    for title, (key, is_of_steps) in _COMPARED.items():
        curves: dict[str, dict[float, float]] = {}
        for name, (steps, evaluations) in runs.items():
            points = binned(_placed(steps)) if is_of_steps else [line for line in evaluations if "step" in line]
            known = {point["step"]: point[key] for point in points if _is_number(point.get(key))}
            if known:
                curves[name] = known
        x = sorted({step for known in curves.values() for step in known})
        kind = "line" if is_of_steps else "points"
        shown = [Curve(name, [known.get(step) for step in x], kind) for name, known in curves.items()]
        found += [Chart(title, x, shown, by="step")] if shown else []
    return found


def _placed(steps: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out lines that say neither step nor time."""
    return [line for line in steps if _is_number(line.get("t")) and _is_number(line.get("step"))]


def staleness_shares(
    steps: Sequence[dict[str, Any]], counts: Iterable[tuple[int, int, int]], by: By = "time"
) -> Chart | None:
    """Count a step's groups by their age in versions when it began; None where nothing is known. `counts` are step,
    version that sampled, and number of groups."""
    began = {
        line["step"]: (line[_X[by]], line["policy_version"])
        for line in steps
        if all(isinstance(line.get(name), int | float) for name in ("step", "t", "policy_version"))
    }
    found: dict[int, list[int]] = {}
    for step, version, count in counts:
        if step in began:
            age = max(0, int(began[step][1]) - version)
            found.setdefault(step, [0] * len(_AGES))[min(age, len(_AGES) - 1)] += count
    shares = [[count / sum(found[step]) for count in found[step]] for step in sorted(found)]
    curves = [Curve(name, [share[age] for share in shares]) for age, name in enumerate(_AGES)]
    x = [began[step][0] for step in sorted(found)]
    shown = [curve for curve in curves if any(curve.values)]
    return Chart("Staleness of a step's groups, share by versions", x, list(shown), by=by) if shown else None


def as_json(found: Iterable[Chart]) -> list[dict[str, Any]]:
    return [chart._asdict() | {"curves": [curve._asdict() for curve in chart.curves]} for chart in found]


def binned(steps: Sequence[dict[str, Any]], most: int = MOST_POINTS) -> list[dict[str, float]]:
    """Return at most `most` steps, each with the means of its neighbours."""
    per_point = -(-len(steps) // most) or 1
    return [_mean(steps[start : start + per_point]) for start in range(0, len(steps), per_point)]


def _mean(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for line in steps:
        for name, value in line.items():
            if isinstance(value, int | float):
                sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def _timeline(lanes: list[Lane], start: float, end: float) -> Chart:
    count = len(lanes[0].shares) if lanes else 1
    width = (end - start) / count
    curves = [
        Curve(lane.name, [round(share, 3) for share in lane.shares], lane.kind) for lane in lanes if any(lane.shares)
    ]
    return Chart("Who did what when", [start + index * width for index in range(count)], curves, lanes=True)


def _with_score(
    x: list[float],
    points: Sequence[dict[str, float]],
    evaluations: Sequence[dict[str, Any]],
    steps: Sequence[dict[str, Any]],
    by: By,
) -> tuple[list[float], list[Curve]]:
    """Held-out scores lie between the steps, at the step whose policy they are of."""
    times = {line["step"]: line[_X[by]] for line in _placed(steps)}
    scores = {
        times[line["step"]]: line["score"]
        for line in evaluations
        if line.get("step") in times and isinstance(line.get("score"), int | float)
    }
    rewards = dict(zip(x, [point.get("reward") for point in points], strict=True))
    merged = sorted({*x, *scores})
    curves = [Curve("reward", [rewards.get(at) for at in merged])]
    if scores:
        curves.append(Curve("held-out score", [scores.get(at) for at in merged], "points"))
    return merged, curves


def _speed(point: dict[str, float]) -> float | None:
    seconds = point.get("wait_s", 0.0) + point.get("step_s", 0.0)
    return point["tokens"] / seconds if seconds and "tokens" in point else None
