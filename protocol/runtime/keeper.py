"""The parent of a process that runs code of the user's: it leaves nothing behind of what that starts.

Guarantee: once the kept process has ended, or SIGTERM has come, or the parent of the keeper has died, SIGKILL included, every
process below the keeper is killed and reaped, whatever its session, group or parent; then the keeper ends as the kept process
did, with its exit status or by its signal. Until then, orphans become the keeper's children (PR_SET_CHILD_SUBREAPER), so that
its descendants are all there is. Only SIGKILL or SIGSTOP for the keeper itself, which code of the same user may send, takes
this away.

It is a script without a module of this project, `python -I -S keeper.py PARENT_PID GRACE_S COMMAND...`, so that it starts in
some ten milliseconds and takes 4 MB. Where GRACE_S is above 0, the kept process gets SIGTERM first, and so long to end.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_LOOK_EVERY_S = 0.01
_NOT_FOUND = 127

_libc = ctypes.CDLL(None, use_errno=True)


class _Keeper:
    """`status` is that of the kept process, as waitpid gives it, once it has ended."""

    def __init__(self, command: list[str]) -> None:
        self.status: int | None = None
        own = os.getpid()
        self._kept = os.fork()
        if self._kept == 0:
            _become(command, own)
        with open(os.devnull, "r+b") as nothing:  # the channels are the kept process's, which may close them
            for descriptor in (0, 1):
                os.dup2(nothing.fileno(), descriptor)
        _close_others()

    def wait(self, ends: set[signal.Signals], seconds: float | None = None) -> None:
        """Wait until the kept process has ended, a signal comes, or time is up."""
        until = None if seconds is None else time.monotonic() + seconds
        while self._reap() and self.status is None:
            left = 3600.0 if until is None else until - time.monotonic()
            if left <= 0:
                return
            came = signal.sigtimedwait(_WATCHED, left)
            if came is not None and came.si_signo in ends:
                return

    def ask_to_terminate(self) -> None:
        if self.status is None:
            os.kill(self._kept, signal.SIGTERM)

    def sweep(self) -> None:
        """Kill child after child. A child is not reaped before, so its id is still its own, and its children become ours."""
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            if not self._reap():
                return
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_EVERY_S)

    def _reap(self) -> bool:
        """Return whether a child is left."""
        try:
            while True:
                child, status = os.waitpid(-1, os.WNOHANG)
                if child == self._kept:
                    self.status = status
                if child == 0:
                    return True
        except ChildProcessError:
            return False


def main(parent: int, grace_s: float, command: list[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    keeper = _Keeper(command)
    keeper.wait({signal.SIGTERM})
    if grace_s > 0:
        keeper.ask_to_terminate()
        keeper.wait(set(), grace_s)
    keeper.sweep()
    _end_as(keeper.status or 0)


def _become(command: list[str], keeper: int) -> NoReturn:
    """The kept process leads a session, so that what it does to its group leaves the keeper alone."""
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            os.execvp(command[0], command)  # noqa: S606 - there is no shell to be had
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(_NOT_FOUND)


def _close_others() -> None:
    """Close the open descriptors, and not each number up to the limit, which may be a thousand million."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(child) for child in listed.read().split()]


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # it left a core already
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
