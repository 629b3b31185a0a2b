"""What the runs of `benchmarks.offpolicy` say together: Markdown tables of means and spreads over the seeds."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

Result = dict[str, Any]


def select(results: Iterable[Result], staleness: int, preset: str) -> list[Result]:
    """The runs of one cell, one per seed."""
    return [one for one in results if (one["case"]["staleness"], one["case"]["preset"]) == (staleness, preset)]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def tables(results: list[Result], stalenesses: Sequence[int], presets: Sequence[str]) -> str:
    """Everything that is known, as Markdown."""

    def accuracy(key: str) -> Callable[[list[Result]], str]:
        return lambda runs: "{:.3f} ± {:.3f}".format(*mean_and_spread([run[key] for run in runs]))

    def measured(runs: list[Result]) -> str:
        means = (
            statistics.fmean(run[key] for run in runs) for key in ("effective_sample_share", "kl", "clipped_share")
        )
        return "{:.2f} / {:.3f} / {:.3f}".format(*means)

    steps = results[0]["plan"]["steps"]
    parts = [
        _grid(f"accuracy after {steps} steps", results, stalenesses, presets, accuracy("final")),
        _grid("mean accuracy over training", results, stalenesses, presets, accuracy("mean_over_training")),
        _grid("effective sample share / KL / share out of bounds", results, stalenesses, presets, measured),
    ]
    return "\n\n".join(parts)


def _grid(
    title: str,
    results: list[Result],
    stalenesses: Sequence[int],
    presets: Sequence[str],
    show: Callable[[list[Result]], str],
) -> str:
    rows = [
        f"| {title} | {' | '.join(f'staleness {staleness}' for staleness in stalenesses)} |",
        f"|---|{'---:|' * len(stalenesses)}",
    ]
    for preset in presets:
        runs = (select(results, staleness, preset) for staleness in stalenesses)
        cells = [show(of_cell) if of_cell else "-" for of_cell in runs]
        rows.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(rows)


mpl.use("Agg")

_COLORS = ("#c0392b", "#1f6fb4", "#e07b39", "#2e8b57", "#7d4fa3")
_WIDTH = 0.06  # between the presets of one staleness, so that their error bars can be told apart


def draw(results: list[Result], stalenesses: Sequence[int], presets: Sequence[str], file: Path) -> None:
    """Left: accuracy after the last step, mean and standard deviation over the seeds, every seed as a dash. Right: mean
    learning curves at the greatest staleness, and the first one at the least. Cells without runs are left out."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for number, (preset, color) in enumerate(zip(presets, _COLORS, strict=False)):
        shift = _WIDTH * (number - (len(presets) - 1) / 2)
        cells = {index: select(results, staleness, preset) for index, staleness in enumerate(stalenesses)}
        finals = {index + shift: [run["final"] for run in runs] for index, runs in cells.items() if runs}
        if not finals:
            continue
        means, spreads = zip(*(mean_and_spread(values) for values in finals.values()), strict=True)
        left.errorbar(
            list(finals), means, yerr=spreads, color=color, marker="o", markersize=4, linewidth=1.2, label=preset
        )
        for place, values in finals.items():
            left.plot([place] * len(values), values, "_", color=color, alpha=0.5, markersize=5)
        if runs := select(results, stalenesses[-1], preset):
            right.plot(*_curve(runs), color=color, linewidth=1.4)
    fresh = next(runs for preset in presets if (runs := select(results, stalenesses[0], preset)))
    right.plot(*_curve(fresh), color="#555555", linestyle="--", linewidth=1.2)
    right.annotate(
        f"dashed: staleness {stalenesses[0]}", (0.97, 0.05), xycoords="axes fraction", ha="right", color="#555555"
    )
    steps = results[0]["plan"]["steps"]
    left.set_xticks(range(len(stalenesses)), [str(staleness) for staleness in stalenesses])
    left.set_xlabel("staleness, policy versions")
    left.set_ylabel("held-out greedy accuracy")
    left.set_title(f"after {steps} steps", fontsize=10)
    right.set_xlabel("optimizer step")
    shown = [fresh, *(select(results, stalenesses[-1], preset) for preset in presets)]
    numbers = sorted({len(runs) for runs in shown} - {0})
    seeds = " to ".join(str(number) for number in sorted({numbers[0], numbers[-1]}))
    right.set_title(f"staleness {stalenesses[-1]}, seeds: {seeds}", fontsize=10)
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
