"""A process and everything it started, as Linux counts them.

Guarantee: processes that end meanwhile are no error; a look costs microseconds per process, whatever else the host runs;
nothing is killed by an id that may be another's by then.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """`pid` and the processes below it, parents first."""
    found = [pid]
    for parent in found:
        for thread in _entries(f"/proc/{parent}/task"):
            try:
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
            except OSError:
                continue
            found += map(int, children.split())
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of all of them; pages that several share count for each."""
    total = 0
    for process in descendants(pid):
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total * _PAGE_BYTES


async def end_tree(process: "subprocess.Popen[bytes]", grace_s: float) -> int:
    """Lets a child that leads a session exit with its own status, so long, then kills what is left; returns its status."""
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(ChildProcessError):  # killed and reaped meanwhile
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # noqa: ASYNC222
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.01)
    return await kill_tree(process)


async def kill_tree(process: "subprocess.Popen[bytes]") -> int:
    """Kills a child that leads a session and whatever it started; returns its exit status."""
    if process.returncode is None:  # not reaped yet, so the id is still its own
        started = descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return await asyncio.to_thread(process.wait, 30)


def exit_text(status: int) -> str:
    """How a process with this exit status ended."""
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
