"""The producer's timeline: one JSON object per line in `RUN_DIR/producer-NAME.jsonl`.

Guarantee: a line is written when `record` returns, so that a killed producer loses none; on a full disk lines are left out,
whole, and the producer goes on.
"""

import errno
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Timeline:
    """Appends events; `t` is Unix time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rest = b""  # of a line that found no room

    def record(self, event: str, **fields: Any) -> None:
        line = json.dumps({"t": time.time(), "event": event, **fields}).encode() + b"\n"
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._file, self._rest) :]
            if not self._rest:
                self._rest = line[os.write(self._file, line) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
