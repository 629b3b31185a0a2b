"""The report of a trial of rewards: numbers, warnings, a table and JSON.

Guarantee: a sum is the one that training uses: the weighted sum of the rewards that are not missing, and NaN where all are. All
functions but `show` are pure.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.files.json_lines import encode_line
from replay.rewards import weighted_sums
from tools.rewards.trial import Scored, Trial

_PROMPT_WIDTH, _COMPLETION_WIDTH = 40, 60


@dataclass(frozen=True)
class Column:
    """One reward over all completions."""

    name: str
    mean: float
    std: float
    missing: int
    failed: int
    call_s: float


def sums(rewards: NDArray[np.float32], weights: list[float]) -> NDArray[np.float64]:
    """(completions, functions), (functions,) -> (completions,)."""
    return weighted_sums(rewards, np.array(weights))


def columns(trial: Trial) -> list[Column]:
    rewards = np.concatenate([group.rewards for group in trial.groups]).astype(np.float64)
    result = []
    for index, name in enumerate(trial.names):
        values = rewards[:, index][~np.isnan(rewards[:, index])]
        failed = sum(count for (function, _), count in trial.failures.items() if function == name)
        calls = trial.seconds[name]
        mean, std = (float(values.mean()), float(values.std())) if len(values) else (math.nan, math.nan)
        call_s = sum(calls) / len(calls) if calls else math.nan
        result.append(Column(name, mean, std, len(rewards) - len(values), failed, call_s))
    return result


def has_signal(group: Scored, weights: list[float]) -> bool:
    """Whether the rewards of some completions differ."""
    total = sums(group.rewards, weights)
    known = total[~np.isnan(total)]
    return len(known) > 1 and not np.allclose(known, known[0], rtol=1e-5, atol=1e-8)


def warnings(trial: Trial) -> list[str]:
    said = []
    for (function, reason), count in sorted(trial.failures.items()):
        said.append(f"{function} failed to score {count} completions ({reason})")
    for number, group in enumerate(trial.groups, 1):
        if group.problem:
            said.append(f"group {number}: nothing was scored: {group.problem}")
        elif not has_signal(group, trial.weights):
            said.append(f"group {number}: all equal: no signal")
    num_completions = sum(len(group.rewards) for group in trial.groups)
    said += [
        f"{column.name} is {column.mean:g} for every completion"
        for column in columns(trial)
        if column.std == 0 and num_completions - column.missing > 1
    ]
    if not any(has_signal(group, trial.weights) for group in trial.groups):
        said.append("no group has a signal: nothing could be learned from these completions")
    return said


def as_json(trial: Trial) -> str:
    """The report as one JSON object, with null for what is missing."""
    groups = []
    for group in trial.groups:
        totals = sums(group.rewards, trial.weights).tolist()
        rows = [
            {"completion": completion, "rewards": dict(zip(trial.names, rewards, strict=True)), "sum": total}
            for completion, rewards, total in zip(group.group.completions, group.rewards.tolist(), totals, strict=True)
        ]
        found = {"signal": has_signal(group, trial.weights), "problem": group.problem or None}
        groups.append({"prompt": group.group.prompt, "completions": rows} | found)
    rewards = [asdict(column) for column in columns(trial)]
    by_name = {reward.pop("name"): reward for reward in rewards}
    return encode_line({"groups": groups, "rewards": by_name, "warnings": warnings(trial)})


def show(trial: Trial, console: Console) -> None:
    table = Table("prompt", "completion", *trial.names, "sum", title="Completions")
    for group in trial.groups:
        totals = sums(group.rewards, trial.weights)
        for row, (completion, total) in enumerate(zip(group.group.completions, totals, strict=True)):
            prompt = _short(group.group.prompt, _PROMPT_WIDTH) if row == 0 else Text("")
            shown = [_number(value) for value in (*group.rewards[row], total)]
            table.add_row(prompt, _short(completion, _COMPLETION_WIDTH), *shown, end_section=row == len(totals) - 1)
    console.print(table)
    summary = Table("reward", "mean", "std", "missing", "failed", "seconds per call", title="Rewards")
    for column in columns(trial):
        numbers = [_number(column.mean), _number(column.std), str(column.missing), str(column.failed)]
        summary.add_row(Text(column.name), *numbers, _number(column.call_s))
    console.print(summary)
    for warning in warnings(trial):
        console.print(Text(f"warning: {warning}", style="yellow"))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _short(said: Any, width: int) -> Text:
    """A text, or the content of the last message, on one line."""
    text = said if isinstance(said, str) else str(said[-1].get("content", "")) if said else ""
    line = text.replace("\n", "\\n")
    return Text(line if len(line) <= width else f"{line[: width - 1]}…")
