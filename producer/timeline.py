"""The producer's timeline: one JSON object per line in `RUN_DIR/producer-NAME.jsonl`.

Guarantee: a line is written when `record` returns, so that a killed producer loses none; on a full disk lines are left out,
whole, and the producer goes on. What timelines take is bounded: of one producer by rotation (`protocol.files.rotated_lines`), of
those that came and went by removing the oldest at the next start.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.files.json_lines import encode_line
from protocol.files.rotated_lines import RotatedLines, older, paths
from protocol.files.space import unless_full

_MAX_BYTES = 16 * 2**20  # of one file; at a line a second more than a day
_KEPT = 64
_LONG_AGO_S = 86_400.0  # a producer that runs writes every second while it is connected


class Timeline:
    """Appends events; `t` is Unix time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_oldest(path.parent)
        self._file = RotatedLines(path, _MAX_BYTES)

    def record(self, event: str, **fields: Any) -> None:
        with unless_full():
            self._file.append(f"{encode_line({'t': time.time(), 'event': event, **fields})}\n".encode())


def _remove_oldest(folder: Path) -> None:
    """Of producers that ended long ago, all but the newest."""
    with suppress(FileNotFoundError):  # another producer that starts is removing them
        written_at = {path: path.stat().st_mtime for path in paths(folder, "producer-*.jsonl")}
        for path in sorted(written_at, key=written_at.__getitem__)[:-_KEPT]:
            if written_at[path] < time.time() - _LONG_AGO_S:
                for file in (older(path), path):
                    file.unlink(missing_ok=True)
