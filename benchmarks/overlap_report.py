"""What the runs of `benchmarks.overlap` say together: tables in Markdown, and accuracy over tokens and time as a picture.

    python -m benchmarks.overlap_report RESULTS [--plot PICTURE]

Guarantee: seconds and sampled tokens count from the first request. Rates and waits are those of the steps after the first
`WARM_UP`. Ratios are of medians, and their quartiles are of ratios between two runs of one round.
"""

import argparse
import math
import statistics
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.tasks import TASKS
from benchmarks.whole_runs import cost_to
from protocol.runtime import json_lines

Result = dict[str, Any]

OWN, SERVED, TRL = "own engine", "vLLM server", "TRL AsyncGRPO"
TUNED, DEFAULT = "TRL, tuned", "TRL, default"
ITS_OWN = -1
"""Stands for TRL's own number of tasks in flight."""

WARM_UP = 3
_SECONDS, _TOKENS = 0, 2  # columns of a checkpoint
_DIGITS = {_SECONDS: 1, _TOKENS: 0}
_SHOWN = {
    OWN: ("Slipstream, own engine", "#1f6fb4"), SERVED: ("Slipstream, vLLM server", "#6fb38a"),
    TUNED: ("TRL AsyncGRPO, tuned", "#e07b39"), DEFAULT: ("TRL AsyncGRPO, default", "#b9a58c"),
}  # fmt: skip
_TITLES = {
    "sums": "sums, 0.4 M parameters",
    "smollm2": "SmolLM2, sums",
    "lcm": "SmolLM2, multiples",
    "times": "SmolLM2, products",
}


def span(one: Result) -> float:
    """Return the seconds of the steps after the first ones."""
    times = one["steps_of"]["t"]
    return float(times[-1] - times[WARM_UP - 1])


def step_s(one: Result) -> float:
    return span(one) / (len(one["steps_of"]["t"]) - WARM_UP)


def trained_per_s(one: Result) -> float:
    return float(sum(one["steps_of"]["tokens"][WARM_UP:]) / span(one))


def sampled_per_s(one: Result) -> float:
    """Return the sampled tokens of a second until the last checkpoint."""
    last = one["accuracy"][-1]
    return float(last[_TOKENS] / last[_SECONDS])


def waits(one: Result) -> float:
    """Return the share of the time that the trainer waited for completions."""
    return sum(value or 0.0 for value in one["steps_of"]["wait_s"][WARM_UP:]) / span(one)


def fastest(results: list[Result], task: str) -> int:
    """Return the number of TRL's tasks in flight with which the first round was near the end soonest, or had the shortest steps
    if none got there."""

    def slowness(one: Result) -> tuple[float, float]:
        seconds = cost(one, TASKS[task].goals[-1], _SECONDS)
        return math.inf if seconds is None else seconds, step_s(one)

    first = [one for one in results if (one["task"], one["arm"], one["round"]) == (task, TRL, 1)]
    return int(min(first, key=slowness)["inflight"])


def cost(one: Result, goal: float, column: int) -> float | None:
    """Return the seconds or sampled tokens until an accuracy is reached; None if it is not."""
    return cost_to(goal, [point[3] for point in one["accuracy"]], [point[column] for point in one["accuracy"]])


def arms_of(results: list[Result], task: str) -> dict[str, list[Result]]:
    """Return the runs of a task by arm. Of TRL they are those with its own number of tasks in flight, and the fastest
    ones, if those are others."""
    runs = [one for one in results if one["task"] == task]
    arms = {arm: [one for one in runs if one["arm"] == arm] for arm in (OWN, SERVED)}
    if theirs := [one for one in runs if one["arm"] == TRL]:
        tuned = fastest(runs, task)
        chosen = ({} if tuned == ITS_OWN else {TUNED: tuned}) | {DEFAULT: ITS_OWN}
        arms |= {arm: [one for one in theirs if one["inflight"] == number] for arm, number in chosen.items()}
    return {arm: found for arm, found in arms.items() if found}


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _with_quartiles(values: list[float], digits: int, of: int, middle: float | None = None) -> str:
    if not values:
        return f"- (0 of {of})"
    low, high = quartiles(values)
    shown = f"{median(values) if middle is None else middle:,.{digits}f}"
    shown += f" ({low:,.{digits}f} to {high:,.{digits}f})" if of > 1 else ""
    return shown if len(values) == of else f"{shown}, {len(values)} of {of}"


def _costs(runs: list[Result], goal: float, column: int) -> dict[int, float]:
    """Return the costs by round, of the runs that reach the goal."""
    return {one["round"]: found for one in runs if (found := cost(one, goal, column)) is not None}


def _columns(task: str) -> list[tuple[int, float]]:
    return [(column, goal) for column in (_SECONDS, _TOKENS) for goal in TASKS[task].goals]


_COSTS = "seconds half way | near the end | sampled tokens half way | near the end"


def table(results: list[Result]) -> str:
    """Return a row for each arm of each task, with medians and quartiles over its rounds."""
    rows = [
        f"| task | arm | runs | {_COSTS} | trained tokens/s | sampled tokens/s | trainer waits | dropped | held out |",
        f"|{'---|' * 12}",
    ]
    for task in _tasks(results):
        for arm, runs in arms_of(results, task).items():
            costs = [
                _with_quartiles(list(_costs(runs, goal, column).values()), _DIGITS[column], len(runs))
                for column, goal in _columns(task)
            ]
            name = f"{task} ({', '.join(f'{goal:.2f}' for goal in TASKS[task].goals)})"
            inflight = {one["inflight"] for one in runs} - {0, ITS_OWN}
            cells = [
                *(name, f"{arm} ({inflight.pop()} in flight)" if inflight else arm, str(len(runs))),
                *costs,
                *(f"{median(map(rate, runs)):,.0f}" for rate in (trained_per_s, sampled_per_s)),
                f"{median(map(waits, runs)):.0%}",
                f"{median(one['dropped'] for one in runs):.0f}",
                f"{median(one['accuracy'][-1][3] for one in runs):.3f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def ratios(results: list[Result]) -> str:
    """Return what our arms cost beside each of TRL's."""
    rows = [f"| task | arm | beside | {_COSTS} |", f"|{'---|' * 7}"]
    for task in _tasks(results):
        arms = arms_of(results, task)
        for ours, theirs in ((ours, theirs) for ours in (OWN, SERVED) for theirs in (TUNED, DEFAULT)):
            if ours in arms and theirs in arms:
                cells = [_ratio(arms[ours], arms[theirs], goal, column) for column, goal in _columns(task)]
                rows.append(f"| {' | '.join([task, ours, theirs, *cells])} |")
    return "\n".join(rows)


def _ratio(ours: list[Result], theirs: list[Result], goal: float, column: int) -> str:
    above, below = (_costs(runs, goal, column) for runs in (ours, theirs))
    paired = [above[number] / below[number] for number in above if number in below]
    middle = median(above.values()) / median(below.values()) if above and below else None
    return _with_quartiles(paired, 2, max(len(ours), len(theirs)), middle)


def _tasks(results: list[Result]) -> list[str]:
    return [task for task in TASKS if any(one["task"] == task for one in results)]


def draw(results: list[Result], file: Path) -> None:
    """Draw accuracy over sampled tokens and over seconds, a column for each task: the median of an arm's runs, and a band from
    the lowest to the highest."""
    import matplotlib as mpl  # half a second
    from matplotlib import pyplot as plt
    from PIL import Image

    mpl.use("Agg")
    tasks, overs = _tasks(results), {"sampled tokens": _TOKENS, "seconds": _SECONDS}
    size = 0.6 + 2.5 * len(tasks), 5.0
    figure, grid = plt.subplots(2, len(tasks), sharey="col", squeeze=False, layout="constrained", figsize=size)
    for axes, task in zip(grid[0], tasks, strict=True):
        axes.set_title(_TITLES.get(task, task), fontsize=10)
    for row, (unit, column) in zip(grid, overs.items(), strict=True):
        row[0].set_ylabel("held-out accuracy")
        for axes, task in zip(row, tasks, strict=True):
            for arm, runs in arms_of(results, task).items():
                (label, color), (places, low, middle, high) = _SHOWN[arm], curve(runs, column)
                axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
                axes.plot(places, middle, color=color, linewidth=1.5, label=label)
            axes.set_xlabel(unit)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.tick_params(labelsize=8)
            axes.locator_params(axis="x", nbins=4)
            axes.grid(alpha=0.25)
    shown = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(file, dpi=125)
    plt.close(figure)
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(96).save(file, optimize=True)  # a third of the bytes


def curve(runs: list[Result], column: int) -> tuple[Any, Any, Any, Any]:
    """Return places of a column as far as all runs go, and the lowest, median and highest accuracy there."""
    places = np.linspace(0.0, min(one["accuracy"][-1][column] for one in runs), 200)
    scores = [
        np.interp(places, [point[column] for point in one["accuracy"]], [point[3] for point in one["accuracy"]])
        for one in runs
    ]
    return places, np.min(scores, 0), np.median(scores, 0), np.max(scores, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results = json_lines.read(options.results)
    print(table(results), ratios(results), sep="\n\n")
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
