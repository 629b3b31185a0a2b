"""`make bench-journal`: how fast groups are accepted, durably, and how long a producer waits for the acknowledgement.

Guarantee: everything is measured in one run on one disk, from the least that durability costs (append and fdatasync) over
the journal alone to the whole path over the wire; ratios are between numbers of that run.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.groups import SHAPE, GroupFactory
from benchmarks.made_on import made_on
from benchmarks.storage import FULL, NORMAL, RAW, Series, commits
from benchmarks.wire import Acknowledgements, acknowledgements

mpl.use("Agg")

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


OFFERED_PER_S = 200.0
PRODUCERS = (1, 8)
_SETTLE_S = 2.0  # for the disk, between two measurements
_KINDS = (RAW, FULL, NORMAL)
_QUANTILES = (50, 90, 99, 99.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/journal.json"), help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="picture to write, e.g. docs/images/bench-journal.png")
    parser.add_argument("--folder", type=Path, help="folder of the disk to measure (default: that of --out)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each wire measurement (default: %(default)s)")
    arguments = parser.parse_args()
    logging.getLogger("consumer").setLevel(logging.ERROR)  # that producers leave is what they are told to do
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    made = made_on()
    with tempfile.TemporaryDirectory(prefix="bench-journal-", dir=arguments.folder or arguments.out.parent) as scratch:
        storage, wire = _measure(Path(scratch), arguments.seconds)
    report = made | _report(storage, wire)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(report)
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(wire, arguments.plot)


def _measure(scratch: Path, seconds: float) -> tuple[list[Series], list[Acknowledgements]]:
    """What loads the disk most comes last, and files stay until the end: the kernel is busy long after big ones go."""
    paced = [_over_the_wire(scratch, producers, OFFERED_PER_S, seconds) for producers in PRODUCERS]
    saturated = [_over_the_wire(scratch, producers, 0.0, seconds / 3) for producers in PRODUCERS]
    time.sleep(_SETTLE_S)
    return commits(scratch, seconds), paced + saturated


def _over_the_wire(scratch: Path, producers: int, offered_per_s: float, duration_s: float) -> Acknowledgements:
    time.sleep(_SETTLE_S)
    folder = scratch / f"{producers}-{offered_per_s:g}"
    folder.mkdir()
    return acknowledgements(folder, producers, offered_per_s, duration_s)


def _report(storage: list[Series], wire: list[Acknowledgements]) -> dict[str, Any]:
    raw = {series.batch: series for series in storage if series.kind == RAW}
    fastest = max(series.groups_per_s for series in raw.values())
    return {
        "group": {
            "completions": SHAPE.num_generations,
            "tokens": SHAPE.num_generations * SHAPE.max_completion_length,
            "bytes": len(GroupFactory(0).frame("0-0-0-1-bench")),
        },
        "sqlite": apsw.sqlite_lib_version(),
        "commits": [
            {
                "kind": series.kind,
                "batch": series.batch,
                "groups_per_s": series.groups_per_s,
                "of_raw": series.groups_per_s / raw[series.batch].groups_per_s,
                **_latency_ms(series.seconds),
            }
            for series in sorted(storage, key=lambda series: (_KINDS.index(series.kind), series.batch))
        ],
        "acknowledgements": [
            {
                "producers": one.producers,
                "offered_per_s": one.offered_per_s or None,
                "groups_per_s": one.groups_per_s,
                "of_fastest_raw": one.groups_per_s / fastest,
                **_latency_ms(one.latency_s),
            }
            for one in wire
        ],
    }


def _latency_ms(seconds: np.ndarray) -> dict[str, float]:
    values = {f"p{q:g}_ms": float(np.percentile(seconds, q)) * 1000 for q in _QUANTILES}
    return values | {"max_ms": float(seconds.max()) * 1000}


def _print(report: dict[str, Any]) -> None:
    print(f"\none group: {report['group']['tokens']} tokens, {report['group']['bytes']} bytes\n")
    print(
        "| commits, one after the other | batch | groups/s | of raw | p50 ms | p99 ms |\n|---|---:|---:|---:|---:|---:|"
    )
    for row in report["commits"]:
        print(
            f"| {row['kind']} | {row['batch']} | {row['groups_per_s']:,.0f} | {row['of_raw']:.2f} "
            f"| {row['p50_ms']:.2f} | {row['p99_ms']:.2f} |"
        )
    print("\n| send to acknowledgement | accepted/s | of fastest raw | p50 ms | p90 ms | p99 ms | p99.9 ms | max ms |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in report["acknowledgements"]:
        offered = f"{row['offered_per_s']:.0f}/s offered" if row["offered_per_s"] else "saturated"
        latencies = " | ".join(f"{row[f'{name}_ms']:.2f}" for name in ("p50", "p90", "p99", "p99.9", "max"))
        producers = f"{row['producers']} producer{'s' if row['producers'] > 1 else ''}"
        print(f"| {offered}, {producers} | {row['groups_per_s']:,.0f} | {row['of_fastest_raw']:.2f} | {latencies} |")


if __name__ == "__main__":
    main()
