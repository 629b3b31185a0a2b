"""What the runs of `benchmarks.offpolicy` say together: Markdown tables of means and spreads over the seeds."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Result = dict[str, Any]


def select(results: Iterable[Result], staleness: int, preset: str) -> list[Result]:
    """The runs of one cell, one per seed."""
    return [one for one in results if (one["case"]["staleness"], one["case"]["preset"]) == (staleness, preset)]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def tables(results: list[Result], pairs: list[Result], stalenesses: Sequence[int], presets: Sequence[str]) -> str:
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
        verdict(results, stalenesses, presets),
    ]
    if pairs:
        parts.append(_pairs(results, pairs))
    return "\n\n".join(parts)


def verdict(results: list[Result], stalenesses: Sequence[int], presets: Sequence[str]) -> str:
    """The best correction against no staleness at all, and the uncorrected run beside it."""
    reference = statistics.fmean(run["final"] for run in select(results, stalenesses[0], "none"))
    lines = []
    for staleness in stalenesses[1:]:
        finals = {
            preset: statistics.fmean(run["final"] for run in select(results, staleness, preset)) for preset in presets
        }
        uncorrected = finals.pop("none")
        best = max(finals, key=lambda preset: finals[preset])
        lines.append(
            f"staleness {staleness}: {best} is {100 * (reference - finals[best]):.1f} points below staleness "
            f"{stalenesses[0]}, none {100 * (reference - uncorrected):.1f}"
        )
    return "\n".join(lines)


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
        cells = [show(select(results, staleness, preset)) for staleness in stalenesses]
        rows.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _pairs(results: list[Result], pairs: list[Result]) -> str:
    """The real pair, and the scripted runs of its preset."""
    preset, bound = pairs[0]["case"]["preset"], pairs[0]["case"]["staleness"]
    scripted = sorted({one["case"]["staleness"] for one in results})
    kinds = [
        (f"real pair, `max_staleness: {bound}`", pairs),
        *((f"scripted, staleness {staleness}", select(results, staleness, preset)) for staleness in scripted),
    ]
    rows = [
        f"| `{preset}` | mean staleness | accuracy at the end | over training | effective sample share | KL |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, runs in kinds:
        staleness, share, kl = (
            statistics.fmean(run[key] for run in runs) for key in ("staleness", "effective_sample_share", "kl")
        )
        final, over = (
            "{:.3f} ± {:.3f}".format(*mean_and_spread([run[key] for run in runs]))
            for key in ("final", "mean_over_training")
        )
        rows.append(f"| {name} | {staleness:.2f} | {final} | {over} | {share:.3f} | {kl:.4f} |")
    return "\n".join(rows)
