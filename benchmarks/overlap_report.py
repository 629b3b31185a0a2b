"""What the arms of `benchmarks.overlap` say: the balance that was asked for, efficiencies, ratios, a Markdown table.

Guarantee: pure functions of numbers that were measured; seconds are per optimizer step, in steady state.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
