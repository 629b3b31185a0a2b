"""The picture of `benchmarks.journal`: how long an acknowledgement takes, as a distribution."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.wire import Acknowledgements

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLORS = ("#1f6fb4", "#e07b39", "#7fb3dc", "#f2bd97")


def draw(wire: Sequence[Acknowledgements], file: Path) -> None:
    """Writes one curve per configuration: the share of groups that were acknowledged within so many milliseconds."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for one, color in zip(wire, _COLORS, strict=True):
        milliseconds = np.sort(one.latency_s) * 1000
        share = np.arange(1, len(milliseconds) + 1) / len(milliseconds)
        offered = f"{one.offered_per_s:.0f} groups/s offered" if one.offered_per_s else "saturated"
        style = "-" if one.offered_per_s else "--"
        label = (
            f"{offered}, {one.producers} producer{'s' if one.producers > 1 else ''}: {one.groups_per_s:,.0f} accepted/s"
        )
        axes.plot(milliseconds, share, style, color=color, label=label)
    for level, name in ((0.5, "p50"), (0.99, "p99")):
        axes.axhline(level, color="#bbbbbb", linewidth=0.7)
        axes.annotate(
            name, (1.0, level), xycoords=("axes fraction", "data"), xytext=(3, -3), textcoords="offset points"
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("from sending a group to reading its acknowledgement, ms")
    axes.set_ylabel("share of groups")
    axes.set_ylim(0, 1.02)
    axes.grid(axis="x", which="both", alpha=0.2)
    axes.legend(frameon=False, fontsize=8, loc="center", bbox_to_anchor=(0.47, 0.68))
    figure.savefig(file, dpi=150)
    plt.close(figure)
