"""How evenly the rows of a step are dealt out to ranks, by simulation: ours beside two usual ways, up to 64 ranks.

    python -m benchmarks.balance [--run RUN_DIR] [--plot FILE]

Guarantee: every way gets the same rows, eight completions per rank, and work is counted as the trainer counts it. What is drawn
is the work of the busiest rank over the larger of the mean of all ranks and the longest row; the line is its 95th percentile.
`[r::world]` takes every W-th row; "equal rows" takes neighbours, as samplers of datasets do.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from consumer.batches.balance import shares
from consumer.batches.micro_batches import cut_rows, tokens_of
from protocol.wire.codec import decode
from protocol.wire.messages import Group
from protocol.wire.schemas import JOURNAL_SCHEMAS
from replay.journal.reader import JournalReader

WORLDS = (2, 4, 8, 16, 32, 64)
ROWS_PER_RANK = 8
MAX_TOKENS = 8192
_PROMPT, _MEDIAN, _LONGEST = 100, 400, 4000  # tokens

Way = Callable[[list[int], int], list[list[int]]]

WAYS: dict[str, Way] = {
    "ours": lambda lengths, world: shares(lengths, MAX_TOKENS, padded=True, world=world),
    "[r::world]": lambda lengths, world: [list(range(rank, len(lengths), world)) for rank in range(world)],
    "equal rows": lambda lengths, world: [part.tolist() for part in np.array_split(np.arange(len(lengths)), world)],
}


def excess(lengths: list[int], ranks: list[list[int]]) -> float:
    """Work of the busiest rank over the mean, or over that of the longest row where it is more."""
    work = [_work([lengths[row] for row in rows]) for rows in ranks]
    return max(work) / max(float(np.mean(work)), tokens_of([max(lengths)], padded=True))


def _work(lengths: list[int]) -> int:
    parts = cut_rows(lengths, MAX_TOKENS, padded=True) if lengths else []
    return sum(tokens_of([lengths[i] for i in part], padded=True) for part in parts)


def log_normal(sigma: float) -> Callable[[np.random.Generator, int], list[int]]:
    def draw(random: np.random.Generator, count: int) -> list[int]:
        completions = np.minimum(_LONGEST, _MEDIAN * random.lognormal(0, sigma, count))
        return (_PROMPT + completions).astype(int).tolist()

    return draw


def of_journal(run_dir: Path) -> Callable[[np.random.Generator, int], list[int]]:
    """Draws among the completions of a run, prompts included, group by group."""
    groups: list[list[int]] = []
    with contextlib.closing(JournalReader(run_dir / "journal.sqlite")) as journal:
        for row in journal.rows():
            frame = journal.body(row)
            if frame is not None:
                group = decode(frame, Group, JOURNAL_SCHEMAS)
                groups.append((len(group.prompt_ids) // 4 + np.frombuffer(group.completion_lengths, "<i4")).tolist())

    def draw(random: np.random.Generator, count: int) -> list[int]:
        lengths: list[int] = []
        while len(lengths) < count:
            lengths += groups[random.integers(len(groups))]
        return lengths[:count]

    return draw


def simulate(draw: Callable[[np.random.Generator, int], list[int]], num_steps: int) -> dict[str, list[float]]:
    """The 95th percentile of `excess` for each way, by number of ranks as in `WORLDS`."""
    random = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for world in WORLDS:
        steps = [draw(random, ROWS_PER_RANK * world) for _ in range(num_steps)]
        for name, way in WAYS.items():
            found[name].append(float(np.quantile([excess(lengths, way(lengths, world)) for lengths in steps], 0.95)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, help="run directory whose journal gives lengths, too")
    parser.add_argument("--steps", type=int, default=100, help="of each number of ranks (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/balance.json"), help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="picture to write")
    options = parser.parse_args(arguments)
    sources = {f"log-normal, sigma {sigma}": log_normal(sigma) for sigma in (0.6, 1.0)}
    if options.run is not None:
        sources["a run's journal"] = of_journal(options.run)
    report = {name: simulate(draw, options.steps) for name, draw in sources.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"worlds": WORLDS, "excess_p95": report}, indent=1), encoding="utf-8")
    for source, ways in report.items():
        print(f"{source}: ranks {'  '.join(f'{world:4}' for world in WORLDS)}")
        for name, values in ways.items():
            print(f"  {name:12}{'  '.join(f'{value:.2f}' for value in values)}")
    if options.plot is not None:
        _plot(report, options.plot)


def _plot(report: dict[str, dict[str, list[float]]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(report), figsize=(4 * len(report), 3.6), layout="constrained", sharey=True)
    for axes, (source, ways) in zip(np.atleast_1d(panels), report.items(), strict=True):
        for (name, values), color in zip(ways.items(), ("#1f6fb4", "#e07b39", "#777777"), strict=True):
            axes.plot(WORLDS, values, "o-", color=color, label=name)
        axes.set(title=source, xlabel="ranks", xscale="log")
        axes.set_xticks(WORLDS, [str(world) for world in WORLDS], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    np.atleast_1d(panels)[0].set_ylabel("busiest rank over the mean, p95")
    np.atleast_1d(panels)[0].legend(frameon=False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
