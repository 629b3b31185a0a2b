"""Children of the daemon die with it, however it dies.

Guarantee: once `die_with_parent` has returned, the kernel kills this process when its parent dies, SIGKILL included.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Called early in a child. `parent_pid` closes the gap in which the parent may have died already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_ctrl_c_to_parent() -> None:
    """The terminal sends Ctrl-C to the whole process group; the parent decides when this child ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
