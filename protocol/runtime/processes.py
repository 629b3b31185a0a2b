"""Processes as Linux sees them: the descendants of one, children that die with their parent, and faster imports.

Guarantee: processes that end meanwhile are no error. Once `die_with_parent` has returned, the kernel kills this process when its
parent dies, SIGKILL included. Below a keeper (`protocol.runtime.keeper`) the list of descendants is complete; elsewhere,
processes that lost their parent are missing.
"""

import contextlib
import ctypes
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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


_PR_SET_PDEATHSIG = 1
_TIED = "SLIPSTREAM_FOLLOW_PARENT"


def die_with_parent(parent_pid: int) -> None:
    """Call it early in a child. The parent may have died before the call, which `parent_pid` shows."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def tie_children() -> None:
    """Let every process that this one or a child of it forks, or spawns with multiprocessing, die with its parent.

    vLLM forks its engine core on some platforms and spawns it on others. A spawned process runs none of our code but
    `producer.app.cli`, which multiprocessing imports first and which calls `follow_parent_if_tied`.
    """
    os.environ[_TIED] = str(os.getpid())
    os.register_at_fork(after_in_child=_follow_parent)


def follow_parent_if_tied() -> None:
    if _TIED in os.environ:
        _follow_parent()


def _follow_parent() -> None:
    """Ctrl-C reaches every process of the daemon's group, but the parent decides when this child ends. Who is parent now may
    have taken over a child whose own parent died before."""
    die_with_parent(os.getppid())
    try:
        os.kill(int(os.environ[_TIED]), 0)
    except ProcessLookupError:
        os._exit(1)
    os.environ[_TIED] = str(os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@contextlib.contextmanager
def block_import(name: str) -> Iterator[None]:
    """Make `name` look absent while a library is imported that could use it; saves seconds and memory."""
    present = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if present is not None:
            sys.modules[name] = present


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection while libraries make half a million objects. None of them is garbage, and searching for some,
    again whenever there are a quarter more, takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
