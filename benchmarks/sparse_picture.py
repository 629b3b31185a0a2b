"""The picture of `benchmarks.sparse`: accuracy over generated tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.sparse_run import ARMS, Plan

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLORS = ("#777777", "#e07b39", "#1f6fb4", "#2a8f5b", "#a23b72")
_POINTS = 200


def draw(plan: Plan, runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes the mean over the seeds of every arm, and the range between the worst and the best."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    grid = np.linspace(0, plan.budget_tokens, _POINTS)
    for arm, color in zip(ARMS, _COLORS, strict=True):
        curves = [np.array(run["curve"]) for run in runs if run["arm"] == arm]
        if not curves:
            continue
        values = np.stack([np.interp(grid, curve[:, 0], curve[:, 3]) for curve in curves])
        axes.plot(grid / 1000, values.mean(axis=0), color=color, linewidth=2, label=arm)
        axes.fill_between(grid / 1000, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("completion tokens generated, thousands")
    axes.set_ylabel("held-out accuracy, sampled")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=150)
    plt.close(figure)
