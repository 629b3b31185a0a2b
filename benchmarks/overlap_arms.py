"""The arms of `benchmarks.overlap`, one at a time: run it, and read what it left behind.

Guarantee: a step's times are the daemons' own (`steps.jsonl`), the engine's are those of the groups in the journal.
"""

import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.runtime import json_lines as rotated_lines
from replay.journal.reader import JournalReader
from slipstream.journal.content import ContentReader

Interval = tuple[float, float]

_REWARD_STEPS = 8  # the last ones, whose mean reward is compared
_NOISE = 2.0  # standard errors


@dataclass(frozen=True)
class Step:
    """One optimizer step; `ended_at` is Unix time. `wait_s` and `train_s` are 0 where nobody measured them."""

    ended_at: float
    reward: float
    wait_s: float = 0.0
    train_s: float = 0.0


@dataclass(frozen=True)
class Arm:
    """What was measured; `generating` has one interval per group, in Unix time."""

    steps: list[Step]
    adapter: Path
    generating: list[Interval] | None = None
    lengths: list[int] | None = None  # of completions


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order, without overlap."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def busy_s(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that lie in one of the intervals."""
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in merged(intervals))


def balanced_layers(generation_s: float, training_s: float, num_layers: int) -> int:
    """The least number of last layers with a LoRA at which a step trains for no less time than it generates.

    A forward pass goes through all layers; a backward pass ends at the first LoRA and costs about twice as much per layer.

    Args:
        training_s: measured with a LoRA in every layer.
    """

    counts = range(1, num_layers + 1)
    return next(
        (count for count in counts if training_s * (1 + 2 * count / num_layers) / 3 >= generation_s), num_layers
    )


def arm(steps: Sequence[Step], warm_up: int, generating: Sequence[Interval] | None) -> dict[str, Any]:
    """The numbers of one arm, over the steps after the first `warm_up`.

    Args:
        generating: times with a request in the engine; None where nobody measured them.
    """
    kept = steps[warm_up:]
    walls = [after.ended_at - before.ended_at for before, after in itertools.pairwise(steps[warm_up - 1 :])]
    wall_s = statistics.fmean(walls)
    last = [step.reward for step in steps[-_REWARD_STEPS:]]
    numbers: dict[str, Any] = {
        "wall_s": wall_s,
        "wall_quartiles_s": quartiles(walls),
        "walls_s": walls,
        "reward_mean": statistics.fmean(last),
        "reward_spread": statistics.stdev(last),
        "rewards": [step.reward for step in steps],
    }
    if generating is not None:
        generation_s = busy_s(generating, steps[warm_up - 1].ended_at, kept[-1].ended_at) / len(kept)
        training_s = statistics.fmean(step.train_s for step in kept)
        numbers |= {
            "generation_s": generation_s,
            "training_s": training_s,
            "producer_idle_share": 1 - generation_s / wall_s,
            "trainer_wait_share": statistics.fmean(step.wait_s for step in kept) / wall_s,
            "efficiency": max(generation_s, training_s) / wall_s,
        }
    return numbers


def ratio(slower: dict[str, Any], faster: dict[str, Any]) -> dict[str, float]:
    """How many times as long a step of one arm takes, with the quartiles over pairs of steps."""
    low, high = quartiles([a / b for a, b in zip(slower["walls_s"], faster["walls_s"], strict=True)])
    return {"mean": slower["wall_s"] / faster["wall_s"], "low": low, "high": high}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def is_equal_reward(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the mean rewards of the last steps differ by no more than their noise."""
    error = math.hypot(one["reward_spread"], other["reward_spread"]) / math.sqrt(_REWARD_STEPS)
    return bool(abs(one["reward_mean"] - other["reward_mean"]) <= _NOISE * error)


def length_statistics(lengths: Sequence[int]) -> dict[str, float]:
    """Of completions; `sigma` is the deviation of their logarithms."""
    logs = [math.log(length) for length in lengths]
    mean, sigma = statistics.fmean(logs), statistics.stdev(logs)
    return {
        "mean": statistics.fmean(lengths),
        "median": statistics.median(lengths),
        "sigma": sigma,
        "skewness": statistics.fmean(((log - mean) / sigma) ** 3 for log in logs),  # 0 if they are log-normal
        "longest": max(lengths),
    }


def table(report: dict[str, Any]) -> str:
    """Everything that is known, as Markdown."""
    names = {
        "pair": f"(a) pair, `max_staleness: {report['staleness']}`",
        "lockstep": "(b) the same pair in lockstep",
        "trl": "(c) TRL's GRPOTrainer, both cores",
    }
    rows = [
        "| | wall time a step, s | quartiles | generating, s | training, s | producer idle | trainer waits "
        "| reward, last steps | held out |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, name in names.items():
        one = report["arms"].get(key)
        if one is None:
            continue
        low, high = one["wall_quartiles_s"]
        measured = (
            f"{one['generation_s']:.2f} | {one['training_s']:.2f} | {one['producer_idle_share']:.0%} | "
            f"{one['trainer_wait_share']:.0%}"
            if "generation_s" in one
            else " | | | "
        )
        rows.append(
            f"| {name} | {one['wall_s']:.2f} | {low:.2f} to {high:.2f} | {measured} | "
            f"{one['reward_mean']:.3f} ± {one['reward_spread']:.3f} | {one['held_out']:.3f} |"
        )
    return "\n".join([*rows, "", *_verdicts(report)])


def _verdicts(report: dict[str, Any]) -> list[str]:
    arms, lockstep = report["arms"], report["arms"]["lockstep"]
    balance = lockstep["generation_s"] / lockstep["training_s"]
    lines = [
        f"balance: generating takes {balance:.2f} of training (in lockstep), with a LoRA in {report['lora_layers']} layers",
        f"overlap efficiency of (a): {arms['pair']['efficiency']:.3f} (asked for: 0.93)",
    ]
    for key, target in (("lockstep", 1.7), ("trl", 1.5)):
        if key in arms:
            one = report["ratios"][key]
            equal = "equal" if is_equal_reward(arms[key], arms["pair"]) else "NOT equal"
            lines.append(
                f"{key} / pair: {one['mean']:.2f} (quartiles {one['low']:.2f} to {one['high']:.2f}; asked for: {target}), "
                f"rewards {equal} within noise"
            )
    lines.append("completion lengths: " + ", ".join(f"{name} {value:.2f}" for name, value in report["lengths"].items()))
    return [f"- {line}" for line in lines]


_GENERATION, _TRAINING, _TRL = "#1f6fb4", "#e07b39", "#777777"
_SHOWN_STEPS = 6


def draw(arms: dict[str, Arm], numbers: dict[str, dict[str, Any]], warm_up: int, file: Path) -> None:
    """Left: as many seconds of (a) and of (b) as six steps of (b) take. Right: wall time per step of every arm."""
    import matplotlib as mpl  # half a second
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 1), layout="constrained")
    shown = [("(a) pair", arms["pair"]), ("(b) lockstep", arms["lockstep"])]
    span_s = _SHOWN_STEPS * numbers["lockstep"]["wall_s"]
    labels = []
    for row, (name, one) in enumerate(shown):
        begin = one.steps[warm_up - 1].ended_at
        training = [(step.ended_at - step.train_s, step.ended_at) for step in one.steps]
        for offset, bars, color in ((0, merged(one.generating or []), _GENERATION), (1, training, _TRAINING)):
            place = 5 - 3 * row - offset
            left.broken_barh(_clipped(bars, begin, span_s), (place - 0.4, 0.8), color=color, edgecolor="white")
            labels.append((place, f"{name}: {('generating', 'training')[offset]}"))
    left.set_yticks([place for place, _ in labels], [label for _, label in labels])
    left.set_xlim(0, span_s)
    left.set_xlabel("seconds")
    left.set_title("one core each", fontsize=10)
    names = {"pair": "(a)", "lockstep": "(b)", "trl": "(c) TRL"}
    keys = [key for key in names if key in numbers]
    walls = [numbers[key]["wall_s"] for key in keys]
    spreads = [
        [wall - numbers[key]["wall_quartiles_s"][0] for key, wall in zip(keys, walls, strict=True)],
        [numbers[key]["wall_quartiles_s"][1] - wall for key, wall in zip(keys, walls, strict=True)],
    ]
    errors = [[max(0.0, value) for value in side] for side in spreads]
    colors = {"pair": _GENERATION, "lockstep": _TRAINING, "trl": _TRL}
    right.bar([names[key] for key in keys], walls, yerr=errors, capsize=4, color=[colors[key] for key in keys])
    right.set_ylabel("wall time per step, s")
    right.grid(axis="y", alpha=0.3)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _clipped(bars: Sequence[Interval], begin: float, span_s: float) -> list[tuple[float, float]]:
    """As (start, duration), counted from `begin`."""
    moved = [(max(0.0, first - begin), min(span_s, last - begin)) for first, last in bars]
    return [(first, last - first) for first, last in moved if last > first]


CONFIG = "benchmarks/overlap.yaml"
PRODUCER_CORE, TRAINER_CORE = 0, 1
_STOP_TIMEOUT_S = 60.0


def run_pair(run_dir: Path, settings: Sequence[str]) -> None:
    """Trains to the end. The daemons' messages go to files in `run_dir`.

    Args:
        settings: overrides of `CONFIG`, as `section.key=value`.
    """
    run_dir.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="overlap-") as sockets:  # paths of sockets must be short
        changes = [*settings, f"run_dir={run_dir}", f"transport.endpoint=ipc://{sockets}/control.ipc"]
        arguments = ["--gpu", "cpu", "--config", CONFIG, *(word for change in changes for word in ("--set", change))]
        producer = _start("producer.app.cli", PRODUCER_CORE, arguments, run_dir / "producer.log")
        trainer = _start("consumer.app.cli", TRAINER_CORE, arguments, run_dir / "trainer.log")
        processes = [producer, trainer]
        try:
            while all(process.poll() is None for process in processes):
                time.sleep(0.2)
            if trainer.poll() == 0:
                producer.wait(_STOP_TIMEOUT_S)  # it ends with its trainer
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait(_STOP_TIMEOUT_S)
    codes = [process.returncode for process in processes]
    if any(codes):
        tails = [log.read_text(errors="replace")[-2000:] for log in sorted(run_dir.glob("*.log"))]
        sys.exit(f"{run_dir}: the pair failed, exit codes {codes}\n" + "\n---\n".join(tails))


def pinned(cores: Sequence[int]) -> dict[str, str]:
    """Environment of a process that computes with one thread on each of `cores`."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _start(module: str, core: int, arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    command = ["taskset", "-c", str(core), sys.executable, "-m", module, *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=pinned([core]), stdout=out, stderr=subprocess.STDOUT)


def pair(run_dir: Path, settings: Sequence[str], *, max_staleness: int) -> Arm:
    run_pair(run_dir, [*settings, f"pipeline.max_staleness={max_staleness}"])
    generating, lengths = _groups(run_dir / "journal.sqlite")
    return Arm(_steps(run_dir), run_dir / "adapter", generating, lengths)


def trl(run_dir: Path, settings: Sequence[str]) -> Arm:
    run_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.overlap_trl", CONFIG, str(run_dir), *settings]
    with (run_dir / "trl.log").open("wb") as log:
        subprocess.run(command, env=pinned(range(2)), stdout=log, stderr=subprocess.STDOUT, check=True)
    return Arm(_steps(run_dir), run_dir / "adapter")


def _steps(run_dir: Path) -> list[Step]:
    lines = rotated_lines.read(run_dir / "steps.jsonl")
    return [Step(line["t"], line["reward"], line.get("wait_s", 0.0), line.get("step_s", 0.0)) for line in lines]


def _groups(journal: Path) -> tuple[list[Interval], list[int]]:
    generating, lengths = [], []
    with closing(JournalReader(journal)) as reader:
        contents = ContentReader(reader)
        for row in list(reader.rows()):
            content = contents.read(row)
            assert content is not None
            ended = row.accepted_at - content.message.reward_s
            generating.append((ended - content.message.generation_s, ended))
            lengths += content.group.completion_lengths.tolist()
    return generating, lengths
