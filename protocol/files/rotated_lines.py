"""Files of JSON lines that keep the newest lines: a full file replaces the older file beside it.

Guarantee: each of the two files has at most `max_bytes`, unless one call appends more. Lines that one call appends stay together,
and are written whole or not at all. A reader beside the writer finds every line of both files once and in order.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from protocol.files.json_lines import append, forget_after, open_to_append
from protocol.files.staged import sync


@dataclass
class RotatedLines:
    path: Path
    max_bytes: int

    def append(self, lines: bytes, *, durable: bool = False) -> None:
        """If it raises `OSError`, none of the lines was written. If it is `durable`, they are on the disk when it returns."""
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
        """Cuts off lines of later steps; see `protocol.files.json_lines.forget_after`."""
        for path in (older(self.path), self.path):
            forget_after(path, step)


def older(path: Path) -> Path:
    """The file with the lines before those in `path`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def paths(folder: Path, pattern: str) -> list[Path]:
    """The newer files of `RotatedLines` in `folder`, by name."""
    return sorted(path for path in folder.glob(pattern) if not path.stem.endswith(".1"))


def read(path: Path) -> list[dict[str, Any]]:
    """All lines, oldest first, without one that is still being written."""
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
