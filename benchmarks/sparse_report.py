"""The tables of `benchmarks.sparse`. Pure functions of the runs' results.

Guarantee: a run that never reached an accuracy counts with its whole budget, and the cell says so; a ratio is of means
over the same seeds.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.sparse_run import Plan

LEVELS = (0.5, 0.8)
"""Sampled accuracies, in expectation, that tokens are counted to."""

Run = dict[str, Any]


def tokens_to(run: Run, level: float) -> float | None:
    """Tokens generated when the expected accuracy first reached `level`, between two points of the curve."""
    points = [(tokens, expected) for tokens, _, _, expected in run["curve"]]
    for (before, low), (after, high) in itertools.pairwise(points):
        if low < level <= high:
            return before + (after - before) * (level - low) / (high - low)
    return None


def tables(plan: Plan, runs: Sequence[Run]) -> str:
    """Markdown: tokens to accuracy by arm, and success by attempt."""
    return "\n".join([*_tokens(plan, runs), "", *_attempts(runs)])


def _tokens(plan: Plan, runs: Sequence[Run]) -> Iterator[str]:
    titles = " | ".join(f"tokens to {level:g} | x" for level in LEVELS)
    counted_titles = "at the end | steps | groups generated | with signal | trained, again | effective share"
    yield f"| arm | groups a step | learning rate | {titles} | {counted_titles} |"
    yield "|---|---:|---:|" + "---:|---:|" * len(LEVELS) + "---:|---:|---:|---:|---:|---:|"
    baseline: dict[float, float] = {}
    for (arm, groups, rate), part in _grouped(runs):
        cells = []
        for level in LEVELS:
            reached = [tokens_to(run, level) for run in part]
            counted = [plan.budget_tokens if tokens is None else tokens for tokens in reached]
            mean, missed = statistics.fmean(counted), reached.count(None)
            baseline.setdefault(level, mean)
            bound = ">" if missed else ""
            cells.append(f"{bound}{mean:,.0f} ({min(counted):,.0f} to {bound}{max(counted):,.0f})")
            cells.append(f"{baseline[level] / mean:.2f}")
        ends = [run["curve"][-1][3] for run in part]
        counts = {name: statistics.fmean(run["counts"].get(name, 0) for run in part) for name in _COUNTED}
        generated = counts["accepted"] + counts["no_signal"]
        end = f"{statistics.fmean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"
        share = "" if arm == "plain" else f"{counts['accepted'] / generated:.0%}"
        effective = statistics.fmean(run["effective_sample_share"] or 0.0 for run in part)  # None: no step
        yield (
            f"| {arm} | {groups} | {rate:g} | {' | '.join(cells)} | {end} | "
            f"{statistics.fmean(run['steps'] for run in part):.0f} | {generated:.0f} | {share} | "
            f"{counts['trained']:.0f}, {counts['replayed']:.0f} | {effective:.2f} |"
        )


_COUNTED = ("accepted", "no_signal", "trained", "replayed")


def _attempts(runs: Sequence[Run]) -> Iterator[str]:
    titles = "success rate | groups with a success | fresh prompts, same versions | fresh prompts, when these failed"
    yield f"| arm, groups a step, learning rate | attempt | groups | {titles} |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for (arm, groups, rate), part in _grouped(runs):
        if not any("1" in run["attempts"] for run in part):
            continue
        for number in sorted({name for run in part for name in run["attempts"]}, key=int):
            found = [run["attempts"][number] for run in part if number in run["attempts"]]
            total = {name: sum(one[name] for one in found) for name in found[0]}
            scored = total["scored"]
            name = "fresh" if number == "0" else f"reroll {number}"
            compared = ["", ""]
            if number != "0":
                compared = [f"{total['fresh_now'] / scored:.3f}", f"{total['fresh_before'] / scored:.3f}"]
            yield (
                f"| {arm}, {groups}, {rate:g} | {name} | {total['groups']} | {total['successes'] / scored:.3f} | "
                f"{total['solved_groups'] / total['groups']:.3f} | {compared[0]} | {compared[1]} |"
            )


def _grouped(runs: Sequence[Run]) -> Iterator[tuple[tuple[str, int, float], list[Run]]]:
    """By arm, groups per step and learning rate, in the order they came."""
    groups: dict[tuple[str, int, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["arm"], run["groups_per_step"], run["learning_rate"]), []).append(run)
    yield from groups.items()
