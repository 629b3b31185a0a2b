"""The producer's timeline: one JSON object per line in `RUN_DIR/producer-NAME.jsonl`.

Guarantee: `record` does not wait for the disk. A thread writes the lines at once, in order. On a full disk, or where a thousand
lines wait for a disk that stands still, lines are left out, whole, and the producer goes on. What timelines take is bounded: of
one producer by rotation (`protocol.runtime.json_lines`), of those that came and went by removing the oldest at the next start.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.runtime.files import ignore_disk_full
from protocol.runtime.json_lines import RotatedLines, encode_line, older, paths

_MAX_BYTES = 16 * 2**20  # of one file; at a line a second more than a day
_MAX_WAITING = 1000  # lines
_KEPT = 64
_LONG_AGO_S = 86_400.0  # a producer that runs writes every second while it is connected


class Timeline:
    """Appends events; `t` is Unix time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_oldest(path.parent)
        self._file = RotatedLines(path, _MAX_BYTES)
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._is_writing = False
        self._error: OSError | None = None

    def record(self, event: str, **fields: Any) -> None:
        """Raise OSError where a line before could not be written, and the disk was not full."""
        line = f"{encode_line({'t': time.time(), 'event': event, **fields})}\n".encode()
        with self._changed:
            if self._error is not None:
                raise self._error
            if len(self._waiting) < _MAX_WAITING:
                self._waiting.append(line)
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write, name="timeline", daemon=True).start()

    def flush(self, limit_s: float = 5.0) -> None:
        """Return when all lines are written, or that takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing, limit_s)

    def _write(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                line = self._waiting.popleft()
            try:
                with ignore_disk_full():
                    self._file.append(line)
            except OSError as error:
                self._error = error


def _remove_oldest(folder: Path) -> None:
    """Remove the timelines of producers that ended long ago, all but the newest."""
    with suppress(FileNotFoundError):  # another producer that starts is removing them
        written_at = {path: path.stat().st_mtime for path in paths(folder, "producer-*.jsonl")}
        for path in sorted(written_at, key=written_at.__getitem__)[:-_KEPT]:
            if written_at[path] < time.time() - _LONG_AGO_S:
                for file in (older(path), path, log(path), older(log(path))):
                    file.unlink(missing_ok=True)


def timeline_path(run_dir: str, producer: str) -> Path:
    return Path(run_dir) / f"producer-{producer}.jsonl"


def log(timeline: Path) -> Path:
    """Return the file of the same producer's log."""
    return timeline.with_suffix(".log")
