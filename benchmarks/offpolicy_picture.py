"""The picture of `benchmarks.offpolicy`: accuracy over staleness, and how it came about."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.offpolicy_report import Result, mean_and_spread, select

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLORS = ("#c0392b", "#1f6fb4", "#e07b39", "#2e8b57", "#7d4fa3")
_WIDTH = 0.06  # between the presets of one staleness, so that their error bars can be told apart


def draw(results: list[Result], stalenesses: Sequence[int], presets: Sequence[str], file: Path) -> None:
    """Left: accuracy after the last step, mean and standard deviation over the seeds, every seed as a dash. Right: mean
    learning curves at the greatest staleness, and at the least without correction."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for number, (preset, color) in enumerate(zip(presets, _COLORS, strict=False)):
        shift = _WIDTH * (number - (len(presets) - 1) / 2)
        places = [index + shift for index in range(len(stalenesses))]
        finals = [[run["final"] for run in select(results, staleness, preset)] for staleness in stalenesses]
        means, spreads = zip(*(mean_and_spread(values) for values in finals), strict=True)
        left.errorbar(places, means, yerr=spreads, color=color, marker="o", markersize=4, linewidth=1.2, label=preset)
        for place, values in zip(places, finals, strict=True):
            left.plot([place] * len(values), values, "_", color=color, alpha=0.5, markersize=5)
        right.plot(*_curve(select(results, stalenesses[-1], preset)), color=color, linewidth=1.4)
    right.plot(*_curve(select(results, stalenesses[0], "none")), color="#555555", linestyle="--", linewidth=1.2)
    right.annotate(
        f"dashed: staleness {stalenesses[0]}", (0.97, 0.05), xycoords="axes fraction", ha="right", color="#555555"
    )
    steps = results[0]["plan"]["steps"]
    left.set_xticks(range(len(stalenesses)), [str(staleness) for staleness in stalenesses])
    left.set_xlabel("staleness, policy versions")
    left.set_ylabel("held-out greedy accuracy")
    left.set_title(f"after {steps} steps", fontsize=10)
    right.set_xlabel("optimizer step")
    right.set_title(f"staleness {stalenesses[-1]}, mean of {len(select(results, 0, 'none'))} seeds", fontsize=10)
    for axes in (left, right):
        axes.set_ylim(-0.03, 1.05)
        axes.grid(axis="y", alpha=0.25)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _curve(runs: list[Result]) -> tuple[list[int], list[float]]:
    steps = [step for step, _ in runs[0]["curve"]]
    return steps, [statistics.fmean(accuracies) for accuracies in zip(*(_accuracies(run) for run in runs), strict=True)]


def _accuracies(run: Result) -> list[float]:
    return [accuracy for _, accuracy in run["curve"]]
