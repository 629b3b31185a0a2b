"""Runs of a benchmark, each of which is made once.

Guarantee: a finished run is a line of a file, with its case, the machine, the commit and the time. A later start skips it.
"""

import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from protocol.runtime import json_lines

CaseT = TypeVar("CaseT", bound=NamedTuple)


class FinishedRuns:
    """The runs that have finished, as `lines`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.lines: list[dict[str, Any]] = json_lines.read(file) if file.exists() else []
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
        gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
        self._made_on = {"machine": f"{gpu}{os.cpu_count()} CPUs, {platform.platform()}", "commit": commit}

    def make(self, case: CaseT, run: Callable[[CaseT], dict[str, Any]]) -> dict[str, Any] | None:
        """Make the run of a case, and return its line; None if it has finished before."""
        if any(case._asdict().items() <= one.items() for one in self.lines):
            return None
        found = run(case) | self._made_on | {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"}
        self.lines.append(found)
        with self._file.open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        return found
