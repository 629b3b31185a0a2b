"""The producer's timeline: one JSON object per line in `RUN_DIR/producer-NAME.jsonl`.

Guarantee: every line is whole and flushed when `record` returns, so that a killed producer loses none.
"""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Timeline:
    """Appends events; `t` is Unix time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")

    def record(self, event: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"t": time.time(), "event": event, **fields}) + "\n")
        self._stream.flush()

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
