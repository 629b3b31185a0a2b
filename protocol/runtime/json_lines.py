"""JSON that is always valid, and files of JSON with one object per line. A full file replaces the older one beside it.

Guarantee: a line is one line of ASCII and valid JSON whatever its values are, also text that UTF-8 cannot encode. A number that
is not finite is null. Lines that one call appends stay together, and are written whole or not at all. Each of the two files of
`RotatedLines` has at most `max_bytes`, unless one call appends more; a reader beside the writer finds every line of both files
once and in order.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from protocol.runtime.files import sync


def encode_line(values: Any) -> str:
    """`values` without the newline. What JSON has no type for becomes its text."""
    return json.dumps(_finite(values), default=str)


def encode_page(values: Any) -> str:
    """The same for people to read, on several lines."""
    return json.dumps(_finite(values), default=str, indent=1) + "\n"


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def open_to_append(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)


def append(file: int, lines: bytes) -> None:
    """Append all of `lines`. If that fails, with an `OSError`, the file is as it was."""
    size, left = os.fstat(file).st_size, lines
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def forget_after(path: Path, step: int) -> None:
    """Cut a file whose lines have ascending `step` before the first line of a later one, or one that is damaged."""
    if not path.is_file():
        return
    with path.open("r+b") as stream:
        kept = 0
        for line in stream:
            if not line.endswith(b"\n") or _step(line) > step:
                break
            kept += len(line)
        stream.truncate(kept)


def _step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a power cut may leave zeros
        return math.inf


@dataclass
class RotatedLines:
    path: Path
    max_bytes: int

    def append(self, lines: bytes, *, durable: bool = False) -> None:
        """Append lines. On `OSError` none of them was written; with `durable` they are on the disk when it returns."""
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
            if size > 0 and size + len(lines) > self.max_bytes:
                self.path.replace(older(self.path))
        file = open_to_append(self.path)
        try:
            append(file, lines)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        if durable:
            sync(self.path.parent)

    def forget_after(self, step: int) -> None:
        """Cut off lines of later steps; see `protocol.runtime.json_lines.forget_after`."""
        for path in (older(self.path), self.path):
            forget_after(path, step)


def older(path: Path) -> Path:
    """The file with the lines before those in `path`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def paths(folder: Path, pattern: str) -> list[Path]:
    """The newer files of `RotatedLines` in `folder`, by name."""
    return sorted(path for path in folder.glob(pattern) if not path.stem.endswith(".1"))


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines, oldest first, without one that is still being written."""
    with opened(path) as files:
        return [json.loads(line) for file in files for line in file if line.endswith(b"\n")]


def read_end(path: Path, num_bytes: int) -> list[bytes]:
    """The lines that are whole in the last `num_bytes`, oldest first."""
    with opened(path) as files:
        sizes = [file.seek(0, os.SEEK_END) for file in files]
        for file, size in zip(files, sizes, strict=True):
            file.seek(max(0, size - num_bytes))
        end = b"".join(file.read(num_bytes) for file in files)[-num_bytes:]
    return end.splitlines()[1:] if sum(sizes) > num_bytes else end.splitlines()


@contextmanager
def opened(path: Path) -> Iterator[list[BinaryIO]]:
    """The files that exist, the older one first, as they were at one moment."""
    while True:
        with ExitStack() as stack:
            files: list[BinaryIO] = []
            for place in (path, older(path)):  # in this order a rotation doubles lines, which can be seen
                with suppress(FileNotFoundError):
                    files.append(stack.enter_context(place.open("rb")))
            if len(files) < 2 or _is(path, files[0]):
                yield files[::-1]
                return


def _is(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
