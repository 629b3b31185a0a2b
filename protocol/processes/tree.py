"""A process and everything it started, as Linux counts them.

Guarantee: processes that end meanwhile are no error. Looking costs microseconds per thread, whatever else the host runs.
Below a keeper (`protocol.processes.keeper`) the list is complete; elsewhere, processes that lost their parent are missing.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_PAUSE_PER_THREAD_S, _LONGEST_PAUSE_S = 0.01, 2.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """`pid` and the processes below it, parents first."""
    return _walk(pid)[0]


def _walk(pid: int) -> tuple[list[int], int]:
    """The descendants, and the number of their threads, each of which has children of its own."""
    found, num_threads = [pid], 0
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                num_threads += 1
                with contextlib.suppress(OSError):
                    found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found, num_threads


def resident_bytes(pid: int) -> int:
    """Resident memory of all of them; pages that several share count for each."""
    return _resident_bytes(descendants(pid))


class Family:
    """A process with its descendants, whose memory is read often. A worker that imported torch has a thread per core, so
    new descendants are looked for the more rarely the more threads there are."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid = pid
        self._clock = clock
        self._known: list[int] = []
        self._walk_at = -math.inf

    def resident_bytes(self) -> int:
        now = self._clock()
        if now >= self._walk_at:
            self._known, num_threads = _walk(self._pid)
            self._walk_at = now + min(_LONGEST_PAUSE_S, num_threads * _PAUSE_PER_THREAD_S)
        return _resident_bytes(self._known)


def _resident_bytes(processes: Sequence[int]) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return total * _PAGE_BYTES


def exit_text(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
