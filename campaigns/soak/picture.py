"""The picture of a soak: every number over time, a line for each lifetime.

Guarantee: whoever looks at it sees what the verdict was made of; the warm-up is shaded.
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.lines import Line2D

from campaigns.soak.load import Record
from campaigns.soak.samples import MEMORY, Lifetime

mpl.use("Agg")
from matplotlib import pyplot as plt

_PANELS = (
    MEMORY,
    "descriptors",
    "threads",
    "processes",
    "files_in_shared_memory",
    "files",
    "journal_bytes",
    "run_dir_bytes",
)
_MB = 1e6


def draw(record: Record, warm_up_s: float, file: Path) -> None:
    everything = [*record.daemons, *record.runs]
    began = min(lifetime.started_at for lifetime in everything)
    colors = {name: f"C{number}" for number, name in enumerate(sorted({_place(each) for each in everything}))}
    figure, grid = plt.subplots(4, 2, figsize=(13, 14), sharex=True, layout="constrained")
    for axes, kind in zip(grid.flat, _PANELS, strict=True):
        scale = _MB if kind.endswith("bytes") else 1.0
        for lifetime in everything:
            if kind in lifetime.values:
                minutes = [(at_s - began) / 60 for at_s in lifetime.at_s]
                values = [value / scale for value in lifetime.values[kind]]
                axes.plot(minutes, values, color=colors[_place(lifetime)], linewidth=1)
        axes.axvspan(0, warm_up_s / 60, color="#eeeeee")
        axes.set_title(kind.replace("_bytes", ", MB").replace("_", " "), fontsize=10)
        axes.grid(alpha=0.2)
    for axes in grid[-1]:
        axes.set_xlabel("minutes")
    handles = [Line2D([], [], color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _place(lifetime: Lifetime) -> str:
    """Its name without its number."""
    return lifetime.name.rstrip("0123456789 ")
