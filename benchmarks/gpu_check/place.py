"""Where a part runs, and what it says.

A part is a module with `run(place, ...)`, which yields findings as they come up: what was measured, with its numbers.
"""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Findings = Iterator[dict[str, Any]]
"""Each has `what`, a text, and beside it numbers and texts by name."""


class NotRunError(Exception):
    """This machine lacks what the part needs. The text says what."""


@dataclass(frozen=True)
class Place:
    """`gpus` are indexes as nvidia-smi counts, none for the CPU. `shared` outlives the part, `folder` is its own."""

    gpus: tuple[int, ...]
    shared: Path
    folder: Path

    @property
    def on_cpu(self) -> bool:
        return not self.gpus

    @property
    def device(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    @property
    def gpu(self) -> str:
        """`--gpu` of a daemon, which counts among the GPUs of this process."""
        return "cpu" if self.on_cpu else "0"

    @property
    def dtype(self) -> str:
        return "float32" if self.on_cpu else "bfloat16"


def need_package(name: str) -> str:
    """Its version. Raises NotRunError if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise NotRunError(f"the package {name} is not installed") from None
