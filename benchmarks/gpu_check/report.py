"""The outcomes of a check as JSON, and as a table for docs/benchmarks.md."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.runner import Outcome
from protocol.runtime.files import staged
from protocol.runtime.json_lines import encode_page

_LONGEST_REASON = 200


def write(out: Path, gpus: Sequence[int], minutes: float, outcomes: Sequence[Outcome]) -> None:
    """`results.json` and `table.md`."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    parts = [asdict(outcome) for outcome in outcomes]
    report = {"date": now, "gpus": list(gpus), "minutes": minutes, "parts": parts}
    for name, text in (("results.json", encode_page(report)), ("table.md", table(outcomes) + "\n")):
        with staged(out / name, durable=False) as partial:
            partial.write_text(text, encoding="utf-8")


def table(outcomes: Sequence[Outcome]) -> str:
    rows = ["| part | what | numbers |", "|---|---|---|"]
    for outcome in outcomes:
        rows += [f"| {outcome.part} | {_cell(one['what'])} | {_numbers(one)} |" for one in outcome.findings]
        if outcome.status != "done":
            rows.append(f"| {outcome.part} | **{outcome.status}** | {_cell(outcome.reason)} |")
    return "\n".join(rows)


def _numbers(finding: dict[str, Any]) -> str:
    return ", ".join(f"{_cell(name)} {_cell(_value(value))}" for name, value in finding.items() if name != "what")


def _value(value: Any) -> str:
    """Four digits of what is not counted."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _cell(text: Any) -> str:
    flat = " ".join(str(text).split()).replace("|", "\\|")
    return flat if len(flat) <= _LONGEST_REASON else flat[:_LONGEST_REASON] + " ..."
