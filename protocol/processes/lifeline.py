"""Children of the daemon die with it, however it dies.

Guarantee: once `die_with_parent` has returned, the kernel kills this process when its parent dies, SIGKILL included.
"""

import ctypes
import os
import signal

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
    """From now on, whatever this process or a child of it forks, or spawns with multiprocessing, dies with its parent.

    vLLM forks its engine core on some platforms and spawns it on others. A spawned process runs none of our code but
    `producer.cli`, which multiprocessing imports first and which calls `follow_parent_if_tied`.
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
