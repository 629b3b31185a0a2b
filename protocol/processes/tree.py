"""A process and everything it started, as Linux counts them.

Guarantee: processes that end meanwhile are no error. Looking costs microseconds per process, whatever else the host runs.
Below a keeper (`protocol.processes.keeper`) the list is complete; elsewhere, processes that lost their parent are missing.
"""

import contextlib
import os
import signal
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """`pid` and the processes below it, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of all of them; pages that several share count for each."""
    total = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return total * _PAGE_BYTES


def exit_text(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
