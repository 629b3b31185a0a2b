"""A GPU that only one side can be on, for daemons that have none: a lock on the file that `ONE_GPU` names, if it names one.

Guarantee: whoever comes while the other side is there fails. What happened, and in which order, is in a file beside it. The
kernel frees the lock of a process that was killed, as a driver frees its memory.
"""

import fcntl
import os
from pathlib import Path
from typing import Literal


class OneGpu:
    """As one process sees it. Producers may be there together, the trainer alone."""

    def __init__(self, side: Literal["producer", "trainer"]) -> None:
        self._side, self._name, self.is_here = side, os.environ.get("ONE_GPU"), False
        self._file = open(self._name, "r+b", buffering=0) if self._name else None  # noqa: SIM115  while the process lives

    def come(self, *, wait: bool = False) -> None:
        kind = fcntl.LOCK_SH if self._side == "producer" else fcntl.LOCK_EX
        if self._file is not None:
            fcntl.lockf(self._file, kind if wait else kind | fcntl.LOCK_NB)
        self.is_here = True
        self._note("comes")

    def is_free(self) -> bool:
        """Return whether `come` would succeed now, as a driver says how much memory is free."""
        if self._file is not None:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return True

    def go(self) -> None:
        self._note("goes")
        self.is_here = False
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _note(self, what: str) -> None:
        if self._name is not None:
            with open(f"{self._name}.log", "a") as log:
                log.write(f"{self._side} {what}\n")


def happened(gpu: Path) -> list[str]:
    log = gpu.with_name(f"{gpu.name}.log")
    return log.read_text().splitlines() if log.exists() else []
