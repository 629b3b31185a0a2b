"""The curves of a run, as the charts of the browser take them.

Guarantee: pure; a curve has at most `MOST_POINTS`, each the mean of the steps that it stands for. A number that a step does not
have is a gap.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slipstream.view.pages.timeline import Lane

MOST_POINTS = 1_000
_RATIO = "sampling/importance_sampling_ratio"


class Curve(NamedTuple):
    name: str
    values: list[float | None]
    kind: str = "line"


class Chart(NamedTuple):
    title: str
    x: list[float]  # Unix time
    curves: list[Curve]
    unit: str = ""
    lanes: bool = False  # each curve has a row of its own


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
    "Seconds of a step": {"waiting": "wait_s", "training": "step_s"},
    "Length of completions, tokens": {"mean": "completions/mean_length", "greatest": "completions/max_length"},
    "Share of what arrived": {"groups without signal": "frac_reward_zero_std",
                              "completions cut off": "completions/clipped_ratio", "replayed": "replay/share"},
}  # fmt: skip


def charts(
    steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], lanes: list[Lane], span: Any
) -> list[Chart]:
    """`steps` are lines in the order of their steps, `evaluations` those of `evaluations.jsonl`, `lanes` cover `span`."""
    points = binned([line for line in steps if isinstance(line.get("t"), int | float)])
    x = [point["t"] for point in points]
    found = [_timeline(lanes, *span)] if span else []
    if x:
        found.append(Chart("Reward", *_with_score(x, points, evaluations, steps)))
        found.append(Chart("Tokens trained per second", x, [Curve("tokens/s", [_speed(point) for point in points])]))
        for title, curves in _OF_STEPS.items():
            shown = [Curve(name, [point.get(key) for point in points]) for name, key in curves.items()]
            found.append(Chart(title, x, [curve for curve in shown if any(v is not None for v in curve.values)]))
    return [chart for chart in found if chart.curves]


def staleness_shares(steps: Sequence[dict[str, Any]], counts: Iterable[tuple[int, int, int]]) -> Chart | None:
    """How many of a step's groups were how many versions old when it began; None where nothing is known. `counts` are step,
    version that sampled, and number of groups."""
    began = {
        line["step"]: (line["t"], line["policy_version"])
        for line in steps
        if all(isinstance(line.get(name), int | float) for name in ("step", "t", "policy_version"))
    }
    found: dict[int, list[int]] = {}
    for step, version, count in counts:
        if step in began:
            age = max(0, int(began[step][1]) - version)
            found.setdefault(step, [0] * len(_AGES))[min(age, len(_AGES) - 1)] += count
    shares = [[count / sum(found[step]) for count in found[step]] for step in sorted(found)]
    curves = [Curve(name, [one[age] for one in shares]) for age, name in enumerate(_AGES)]
    x = [began[step][0] for step in sorted(found)]
    shown = [curve for curve in curves if any(curve.values)]
    return Chart("Staleness of a step's groups, share by versions", x, list(shown)) if shown else None


def binned(steps: Sequence[dict[str, Any]], most: int = MOST_POINTS) -> list[dict[str, float]]:
    """At most `most` steps, each with the means of its neighbours."""
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
) -> tuple[list[float], list[Curve]]:
    """Held-out scores lie between the steps, at the time of the step whose policy they are of."""
    times = {line["step"]: line["t"] for line in steps if "step" in line and isinstance(line.get("t"), int | float)}
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
