"""What happened to a run in the cluster, as lines for people.

Guarantee: a line is one line. A reader that asks again gets what came since; the newest thousand lines are kept in memory, and
more of them in a file of at most 2 * 4 MiB.
"""

import contextlib
import threading
import time
from collections import deque
from pathlib import Path

from protocol.runtime.json_lines import RotatedLines, read_end
from slipstream.tables import printable

_MAX_BYTES = 4 * 2**20
_KEPT = 1000


class Events:
    """May be used from any thread. `file` outlives the process."""

    def __init__(self, file: Path) -> None:
        self._file = RotatedLines(file, _MAX_BYTES)
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._count = 0
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {printable(' | '.join(text.splitlines()))}"
        with self._lock:
            self._lines.append(line)
            self._count += 1
            with contextlib.suppress(OSError):  # a full disk stops no run
                self._file.append(f"{line}\n".encode())

    def since(self, number: int) -> tuple[int, list[str]]:
        """The lines after the first `number`, as far as they are kept, and how many there have been."""
        with self._lock:
            new = max(0, min(self._count - number, len(self._lines)))
            return self._count, list(self._lines)[len(self._lines) - new :]

    def last_lines(self, count: int) -> list[str]:
        """Of the file."""
        return [line.decode(errors="replace") for line in read_end(self._file.path, _MAX_BYTES)][-count:]
