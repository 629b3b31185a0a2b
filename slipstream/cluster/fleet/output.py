"""What a command prints, in a file that outlives its actor.

Guarantee: the file and the one before it hold the newest output, at most `2 * MAX_BYTES` and what is written between two looks.
A command that outlives its actor while it drains goes on writing to it. On a full disk the file stays as it is; of one that
somebody deleted there are no words.
"""

import os
import shutil
from pathlib import Path

from protocol.runtime.files import unless_full
from protocol.runtime.json_lines import older, read_end

MAX_BYTES = 16 * 2**20
_LONGEST_MESSAGE = 2000


class Output:
    """`path` is made, with its folder, for its owner alone."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        self._max_bytes = max_bytes
        self._begin = self._size

    @property
    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def opened(self) -> int:
        """A descriptor for a new process, whose last words begin here."""
        file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._begin = self._size
        return file

    def rotate(self) -> None:
        """Empties a full file into the one before. What is written meanwhile may be lost, which no writer notices."""
        if self._size > self._max_bytes:
            with unless_full():
                shutil.copyfile(self._path, older(self._path))
                os.truncate(self._path, 0)
                self._begin = 0

    def last_lines(self, count: int) -> list[str]:
        """Of all processes, oldest first."""
        lines = [line.decode(errors="replace") for line in read_end(self._path, self._max_bytes)]
        return lines[-count:] if count else []

    def last_words(self) -> str:
        """How the newest process ended: its error, or its last lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._begin, self._size - 16 * _LONGEST_MESSAGE))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        error = next((number for number in reversed(range(len(lines))) if ": error: " in lines[number]), None)
        return "\n".join(lines[-6:] if error is None else lines[error:])[-_LONGEST_MESSAGE:]
