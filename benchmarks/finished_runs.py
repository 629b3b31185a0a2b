"""Runs of a benchmark, each of which is made once.

Guarantee: a finished run is a line of a file, with its case and what it was made on. A later start skips it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.made_on import made_on
from protocol.runtime import json_lines

CaseT = TypeVar("CaseT", bound=NamedTuple)


class FinishedRuns:
    """The runs that have finished, as `lines`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.lines: list[dict[str, Any]] = json_lines.read(file) if file.exists() else []

    def make(self, case: CaseT, run: Callable[[CaseT], dict[str, Any]]) -> dict[str, Any] | None:
        """Make the run of a case, and return its line; None if it has finished before."""
        if any(case._asdict().items() <= one.items() for one in self.lines):
            return None
        began = made_on()
        found = run(case) | began
        self.lines.append(found)
        with self._file.open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        return found
