"""The producer's timeline: one JSON object per line in `RUN_DIR/producer-NAME.jsonl`.

Guarantee: a line is written when `record` returns, so that a killed producer loses none; on a full disk lines are left out,
whole, and the producer goes on.
"""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from protocol.json_lines import append, encode_line, open_to_append, unless_full


class Timeline:
    """Appends events; `t` is Unix time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(path)

    def record(self, event: str, **fields: Any) -> None:
        with unless_full():
            append(self._file, f"{encode_line({'t': time.time(), 'event': event, **fields})}\n".encode())

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
