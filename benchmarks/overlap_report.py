"""What the runs of `benchmarks.overlap` say together: a table in Markdown, and accuracy over time as a picture.

Guarantee: seconds of a step are between the ends of two steps, from the `WARM_UP`-th on. Ratios are between runs of one round.
"""

import itertools
import statistics
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.whole_runs import WORTH

Result = dict[str, Any]
Arm = tuple[str, int, int, int]
"""An arm is its name, the staleness, the number of TRL's tasks in flight, and the steps."""

OWN, SERVED, TRL = "own engine", "vLLM server", "TRL AsyncGRPO"
WARM_UP = 5


def walls(one: Result) -> list[float]:
    """Return the seconds of each step after the first ones."""
    return [after - before for before, after in itertools.pairwise(one["steps_of"]["t"][WARM_UP - 1 :])]


def step_s(one: Result) -> float:
    return fmean(walls(one))


def trained_per_s(one: Result) -> float:
    """Return the trained tokens of a second."""
    return float(sum(one["steps_of"]["tokens"][WARM_UP:]) / sum(walls(one)))


def sync_s(one: Result) -> float:
    """Return the seconds of a step that the trainer stops for to hand over its weights, as TRL measures them. For the pair they
    are all that is neither waiting nor training, which is more."""
    of = {name: values[WARM_UP:] for name, values in one["steps_of"].items()}
    if one["arm"] == TRL:
        return fmean(of["sync_s"])
    return fmean(
        wall - waited - trained for wall, waited, trained in zip(walls(one), of["wait_s"], of["step_s"], strict=True)
    )


def fastest(results: list[Result], task: str, staleness: int) -> int:
    """Return the number of TRL's tasks in flight with which the first round's steps were the shortest."""
    tried = [
        one for one in results
        if (one["task"], one["arm"], one["staleness"], one["round"]) == (task, TRL, staleness, 1)
    ]  # fmt: skip
    return int(min(tried, key=step_s)["inflight"])


def reached(one: Result, accuracy: float) -> tuple[float, int] | None:
    """Return the seconds from the first step to the first checkpoint with this accuracy, and its step; None if no checkpoint has
    it."""
    return next(((at, number) for at, number, score in one["accuracy"] if score >= accuracy), None)


def seconds_to(one: Result, accuracy: float) -> float | None:
    """Return the seconds until an accuracy is reached; None if it is not."""
    found = reached(one, accuracy)
    return found and found[0]


def tokens_to(one: Result, accuracy: float) -> int | None:
    """Return the tokens sampled until an accuracy is reached; None if it is not, or tokens were not counted."""
    found, counted = reached(one, accuracy), one["steps_of"].get("sampled")
    return found and counted and counted[found[1] - 1]


def by_arm(results: list[Result]) -> dict[Arm, list[Result]]:
    found: dict[Arm, list[Result]] = defaultdict(list)
    for one in results:
        found[one["arm"], one["staleness"], one["inflight"], one["steps"]].append(one)
    return dict(sorted(found.items()))


def table(results: list[Result]) -> str:
    """Return a row for each arm: means over its rounds, and ratios to our own engine at the same staleness (in turns: at 1)."""
    goal = WORTH * max(one["accuracy"][-1][2] for one in results)
    rows = [
        f"| arm | staleness | in flight | steps | runs | seconds a step (quartiles) | beside `{OWN}` | trained tokens/s "
        "| trainer waits | seconds for a sync | CPU: engine, trainer | completions dropped | peak memory | accuracy "
        f"| seconds to {goal:.2f} | sampled tokens to it |",
        f"|{'---|' * 16}",
    ]
    reference = {(one["staleness"], one["round"]): step_s(one) for one in results if one["arm"] == OWN}
    for (arm, staleness, inflight, steps), runs in by_arm(results).items():
        low, high = quartiles([wall for one in runs for wall in walls(one)])
        beside = [
            step_s(one) / reference[staleness or 1, one["round"]]
            for one in runs
            if (staleness or 1, one["round"]) in reference
        ]
        shares = [f"{fmean(one['cpu_share'].get(side, 0.0) for one in runs):.2f}" for side in ("engine", "trainer")]
        seconds_of = [seconds for one in runs if (seconds := seconds_to(one, goal)) is not None]
        sampled = [tokens for one in runs if (tokens := tokens_to(one, goal)) is not None]
        cells = [
            *(arm, str(staleness), str(inflight or "-"), str(steps), str(len(runs))),
            f"{fmean(map(step_s, runs)):.2f} ({low:.2f} to {high:.2f})",
            f"{fmean(beside):.2f}" if beside else "-",
            f"{fmean(map(trained_per_s, runs)):,.0f}",
            f"{fmean(map(_share_of_waiting, runs)):.0%}",
            f"{fmean(map(sync_s, runs)):.2f}",
            ", ".join(shares),
            f"{fmean(one['dropped'] for one in runs):.0f}",
            f"{max(one['peak_memory'] for one in runs) / 2**30:.1f} GiB",
            f"{fmean(one['accuracy'][-1][2] for one in runs):.3f}",
            f"{fmean(seconds_of):.0f} ({len(seconds_of)} of {len(runs)})" if seconds_of else "-",
            f"{fmean(sampled):,.0f}" if sampled else "-",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _share_of_waiting(one: Result) -> float:
    waited = one["steps_of"]["wait_s"][WARM_UP:]
    return sum(value or 0.0 for value in waited) / sum(walls(one))


def quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def draw(results: list[Result], file: Path) -> None:
    """Draw accuracy over the seconds since the first step, over steps and, where they were counted, over sampled tokens: a thin
    line for each run, a colour for each arm, a row for each staleness. Of TRL only the fastest setting is drawn."""
    import matplotlib as mpl  # half a second
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    stalenesses = sorted({one["staleness"] for one in results} - {0})
    overs = {"seconds since the first step": _over_seconds, "steps": _over_steps}
    if all("sampled" in one["steps_of"] for one in results):
        overs["sampled tokens"] = _over_tokens
    figure, grid = plt.subplots(
        len(stalenesses), len(overs), sharex="col", sharey=True, squeeze=False, layout="constrained",
        figsize=(3.2 * len(overs), 0.6 + 2.4 * len(stalenesses)),
    )  # fmt: skip
    colors = {OWN: "#1f6fb4", SERVED: "#7fb3dc", TRL: "#e07b39", "in turns": "#777777"}
    for staleness, row in zip(stalenesses, grid, strict=True):
        row[0].set_ylabel(f"held out, staleness {staleness}")
        shown_runs = [
            one for one in results
            if one["staleness"] in (0, staleness)
            and (one["arm"] != TRL or one["inflight"] == fastest(results, one["task"], staleness))
        ]  # fmt: skip
        for axes, over in zip(row, overs.values(), strict=True):
            axes.grid(alpha=0.25)
            for one in shown_runs:
                name = one["arm"] if one["staleness"] else "in turns"
                accuracy = [score for *_, score in one["accuracy"]]
                axes.plot(over(one), accuracy, color=colors[name], linewidth=1.2, label=name)
    for axes, label in zip(grid[-1], overs, strict=True):
        axes.set_xlabel(label)
    shown = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _over_seconds(one: Result) -> list[float]:
    return [at for at, _, _ in one["accuracy"]]


def _over_steps(one: Result) -> list[float]:
    return [number for _, number, _ in one["accuracy"]]


def _over_tokens(one: Result) -> list[float]:
    return [one["steps_of"]["sampled"][number - 1] for _, number, _ in one["accuracy"]]
