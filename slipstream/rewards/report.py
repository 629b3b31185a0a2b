"""The report of a trial of rewards, and its tables.

Guarantee: a sum is the one that training uses: the weighted sum of the rewards that are not missing, and NaN where all are.
"""

import math
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay.rewards import weighted_sums
from slipstream.rewards.trial import Trial
from slipstream.tables import printable

_PROMPT_WIDTH, _COMPLETION_WIDTH = 40, 60


def report(trial: Trial) -> dict[str, Any]:
    """The numbers of every completion, group and reward, with NaN for what is missing, and the warnings."""
    groups, rewards = [], {}
    warnings = [f"{name} failed to score {n} completions ({why})" for (name, why), n in sorted(trial.failures.items())]
    for number, group in enumerate(trial.groups, 1):
        totals = weighted_sums(group.rewards, np.array(trial.weights))
        known = totals[~np.isnan(totals)]
        has_signal = len(known) > 1 and not np.allclose(known, known[0], rtol=1e-5, atol=1e-8)
        rows = [
            {"completion": completion, "rewards": dict(zip(trial.names, values, strict=True)), "sum": total}
            for completion, values, total in zip(
                group.completions, group.rewards.tolist(), totals.tolist(), strict=True
            )
        ]
        found = {"signal": has_signal, "problem": group.problem or None}
        groups.append({"prompt": group.prompt, "completions": rows} | found)
        if group.problem:
            warnings.append(f"group {number}: nothing was scored: {group.problem}")
        elif not has_signal:
            warnings.append(f"group {number}: all equal: no signal")
    of_all = np.concatenate([group.rewards for group in trial.groups]).astype(np.float64)
    for name, column in zip(trial.names, of_all.T, strict=True):
        known, calls = column[~np.isnan(column)], trial.seconds[name]
        rewards[name] = {
            "mean": float(known.mean()) if len(known) else math.nan,
            "std": float(known.std()) if len(known) else math.nan,
            "missing": len(column) - len(known),
            "failed": sum(count for (function, _), count in trial.failures.items() if function == name),
            "call_s": sum(calls) / len(calls) if calls else math.nan,
        }
        if len(known) > 1 and known.std() == 0:
            warnings.append(f"{name} is {known[0]:g} for every completion")
    if not any(group["signal"] for group in groups):
        warnings.append("no group has a signal: nothing could be learned from these completions")
    return {"groups": groups, "rewards": rewards, "warnings": warnings}


def show(found: dict[str, Any], console: Console) -> None:
    table = Table("prompt", "completion", *found["rewards"], "sum", title="Completions")
    for group in found["groups"]:
        prompt = _short(group["prompt"], _PROMPT_WIDTH)
        for row in group["completions"]:
            shown = [_number(value) for value in (*row["rewards"].values(), row["sum"])]
            table.add_row(prompt, _short(row["completion"], _COMPLETION_WIDTH), *shown)
            prompt = Text("")
        table.add_section()
    console.print(table)
    summary = Table("reward", "mean", "std", "missing", "failed", "seconds per call", title="Rewards")
    for name, numbers in found["rewards"].items():
        summary.add_row(Text(name), *map(_number, numbers.values()))
    console.print(summary)
    for warning in found["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(said: Any, width: int) -> Text:
    """A text, or the content of the last message, on one line that cannot move the cursor."""
    text = said if isinstance(said, str) else str(said[-1].get("content", "")) if said else ""
    line = printable(text)
    return Text(line if len(line) <= width else f"{line[: width - 1]}…")
