"""The picture of `benchmarks.overlap`: what both sides did when, and how long a step takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.overlap_arms import Arm
from benchmarks.overlap_report import Interval, merged

mpl.use("Agg")
from matplotlib import pyplot as plt

_GENERATION, _TRAINING, _TRL = "#1f6fb4", "#e07b39", "#777777"
_SHOWN_STEPS = 6


def draw(arms: dict[str, Arm], numbers: dict[str, dict[str, Any]], warm_up: int, file: Path) -> None:
    """Left: as many seconds of (a) and of (b) as six steps of (b) take. Right: wall time per step of every arm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 1), layout="constrained")
    shown = [("(a) pair", arms["pair"]), ("(b) lockstep", arms["lockstep"])]
    span_s = _SHOWN_STEPS * numbers["lockstep"]["wall_s"]
    labels = []
    for row, (name, one) in enumerate(shown):
        begin = one.steps[warm_up - 1].ended_at
        training = [(step.ended_at - step.train_s, step.ended_at) for step in one.steps]
        for offset, bars, color in ((0, merged(one.generating or []), _GENERATION), (1, training, _TRAINING)):
            place = 5 - 3 * row - offset
            left.broken_barh(_clipped(bars, begin, span_s), (place - 0.4, 0.8), color=color, edgecolor="white")
            labels.append((place, f"{name}: {('generating', 'training')[offset]}"))
    left.set_yticks([place for place, _ in labels], [label for _, label in labels])
    left.set_xlim(0, span_s)
    left.set_xlabel("seconds")
    left.set_title("one core each", fontsize=10)
    names = {"pair": "(a)", "lockstep": "(b)", "trl": "(c) TRL"}
    keys = [key for key in names if key in numbers]
    walls = [numbers[key]["wall_s"] for key in keys]
    spreads = [
        [wall - numbers[key]["wall_quartiles_s"][0] for key, wall in zip(keys, walls, strict=True)],
        [numbers[key]["wall_quartiles_s"][1] - wall for key, wall in zip(keys, walls, strict=True)],
    ]
    errors = [[max(0.0, value) for value in side] for side in spreads]
    colors = {"pair": _GENERATION, "lockstep": _TRAINING, "trl": _TRL}
    right.bar([names[key] for key in keys], walls, yerr=errors, capsize=4, color=[colors[key] for key in keys])
    right.set_ylabel("wall time per step, s")
    right.grid(axis="y", alpha=0.3)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _clipped(bars: Sequence[Interval], begin: float, span_s: float) -> list[tuple[float, float]]:
    """As (start, duration), counted from `begin`."""
    moved = [(max(0.0, first - begin), min(span_s, last - begin)) for first, last in bars]
    return [(first, last - first) for first, last in moved if last > first]
