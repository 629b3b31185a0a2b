"""JSON that is always valid, and files of JSON with one object per line.

Guarantee: a line is one line of ASCII and valid JSON whatever its values are, also text that UTF-8 cannot encode. A number that
is not finite is null. A line is appended to a file whole, or not at all.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
    """Appends all of `lines`. If that fails, with an `OSError`, the file is as it was."""
    size, left = os.fstat(file).st_size, lines
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def forget_after(path: Path, step: int) -> None:
    """Cuts a file whose lines have ascending `step` before the first line of a later one, or one that is damaged."""
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
