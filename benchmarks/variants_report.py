"""What the runs of `benchmarks.variants` say together: a table in Markdown, and accuracy over time and tokens as a picture."""

import itertools
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.whole_runs import cost_to, goals_of

Result = dict[str, Any]
SHARE = "sampling/importance_sampling_ratio/effective_sample_share"


def cost_of(one: Result, accuracy: float, column: int) -> float | None:
    """Return the seconds (column 0), steps (1) or sampled tokens (2) until this accuracy is reached, if it is."""
    points = one["accuracy"]
    return cost_to(accuracy, [point[3] for point in points], [point[column] for point in points])


def by_variant(results: list[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        found[one["variant"]].append(one)
    return dict(found)


def table(results: list[Result]) -> str:
    """Return a row for each variant: medians over its seeds, and the mean accuracy of its last checkpoints."""
    goals = goals_of(results[0]["task"], [one["accuracy"][-1][3] for one in results])
    costs_to = "".join(f"seconds to {goal:.2f} | steps | sampled tokens | " for goal in goals)
    rows = [
        f"| variant | runs | accuracy at the end | {costs_to}groups with signal | trainer waits | effective sample share |",
        f"|{'---|' * (6 + 3 * len(goals))}",
    ]
    for variant, runs in by_variant(results).items():
        costs = []
        for goal, column in itertools.product(goals, range(3)):
            reached = [cost for one in runs if (cost := cost_of(one, goal, column)) is not None]
            costs.append(f"{median(reached):.0f} ({len(reached)} of {len(runs)})" if reached else "-")
        cells = [
            *(variant, str(len(runs)), f"{fmean(one['accuracy'][-1][3] for one in runs):.3f}"),
            *costs,
            f"{fmean(map(_with_signal, runs)):.0%}",
            f"{fmean(map(_waiting, runs)):.0%}",
            f"{fmean(share for one in runs for share in one['steps_of'][SHARE] if share is not None):.3f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _with_signal(one: Result) -> float:
    return float(one["outcomes"].get("accepted", 0) / sum(one["outcomes"].values()))


def _waiting(one: Result) -> float:
    """Return the share of the time between the first and the last step that the trainer waited for rollouts."""
    of = one["steps_of"]
    return float(sum(of["wait_s"][1:]) / (of["t"][-1] - of["t"][0]))


def draw(results: list[Result], file: Path) -> None:
    """Draw accuracy over seconds and over sampled tokens."""
    import matplotlib as mpl  # half a second
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    figure, row = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axes, column, label in zip(row, (0, 2), ("seconds since the first request", "sampled tokens"), strict=True):
        curves(axes, results, column)
        axes.set_xlabel(label)
    row[0].set_ylabel("held-out accuracy")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def curves(axes: Any, results: list[Result], column: int) -> None:
    """Draw accuracy over a column of `cost_of`: a thin line for each run, a colour for each variant."""
    for number, (variant, runs) in enumerate(by_variant(results).items()):
        for one in runs:
            places = [point[column] for point in one["accuracy"]]
            shown = variant if one is runs[0] else None
            axes.plot(places, [point[3] for point in one["accuracy"]], color=f"C{number}", linewidth=1.2, label=shown)
    axes.grid(alpha=0.25)
