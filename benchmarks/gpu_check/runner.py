"""Runs parts one after the other, each in a process of its own.

Guarantee: a part ends within its limit or what is left of all, and everything that it started ends with it. Its findings and why
it ended are known, whatever it did.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_check.plan import Part, obstacle
from protocol.runtime.child import KeptProcess
from protocol.runtime.processes import exit_text

_ENTRY = "benchmarks.gpu_check.part"
_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_LEAST_S = 5.0  # with less time than this no part begins


@dataclass(frozen=True)
class Outcome:
    part: str
    status: Literal["done", "failed", "too slow", "not run"]
    reason: str = ""
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)


async def run_parts(
    parts: Sequence[Part], gpus: Sequence[int], out: Path, seconds: float, note: Callable[[Outcome], None]
) -> None:
    """Notes an outcome for each part as soon as there is one. No part runs after `seconds`."""
    deadline = time.monotonic() + seconds
    for part in parts:
        left_s = deadline - time.monotonic()
        if why := obstacle(part, gpus):
            note(Outcome(part.name, "not run", why))
        elif left_s < _LEAST_S:
            note(Outcome(part.name, "not run", "the time was over"))
        else:
            limit_s = min(left_s, part.limit_s) if gpus else left_s  # limits are those of a GPU
            note(await run_part(part, gpus, out, limit_s))


async def run_part(part: Part, gpus: Sequence[int], out: Path, limit_s: float) -> Outcome:
    """`out` is a folder that parts of other checks leave alone."""
    folder, findings = out / part.name, out / f"{part.name}.findings.jsonl"
    folder.mkdir()
    gpu = ",".join(map(str, range(min(len(gpus), max(1, part.num_gpus))))) or "cpu"  # among those of this process
    command = [sys.executable, "-W", "ignore", "-m", _ENTRY, part.name, gpu]
    command += [str(out.parent), str(folder), str(findings)]
    began = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as log:
        process = KeptProcess(
            command,
            _GRACE_S,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            status = await process.exited(limit_s)
        finally:
            await process.terminate()
    seconds = time.monotonic() - began
    return judged(part.name, status, limit_s, seconds, _lines(findings))


def judged(name: str, status: int | None, limit_s: float, seconds: float, lines: list[dict[str, Any]]) -> Outcome:
    """What became of a part, from its exit status (None: it did not end in time) and the lines that it wrote."""
    findings = [line for line in lines if "what" in line]
    last = lines[-1] if lines else {}
    if status is None:
        return Outcome(name, "too slow", f"it did not end within {limit_s:.0f} s", seconds, findings)
    if "not_run" in last:
        return Outcome(name, "not run", str(last["not_run"]), seconds, findings)
    if status != 0:
        return Outcome(name, "failed", str(last.get("failed", exit_text(status))), seconds, findings)
    return Outcome(name, "done", "", seconds, findings)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
