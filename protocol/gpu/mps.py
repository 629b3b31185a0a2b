"""Whether CUDA programs of this machine work through MPS, which lets kernels of two processes run on a GPU at the same time.

CUDA itself decides: a process connects to the control daemon when there is one, and no switch of ours changes that.
"""

import os
from pathlib import Path

import psutil

_PIPES = "/tmp/nvidia-mps"  # noqa: S108  where the control daemon puts them unless it is told otherwise
_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def mps_in_words() -> str:
    """What this process will do, for the log."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _PIPES)
    if not _runs(folder):
        return f"CUDA MPS does not run ({folder}), so kernels of trainer and engine take turns on the GPU"
    share = os.environ.get(_THREADS)
    limit = f", with {_THREADS}={share} for this daemon" if share else ""
    return f"CUDA MPS runs ({folder}): kernels of trainer and engine work side by side{limit}"


def _runs(folder: Path) -> bool:
    """The control daemon removes the file when it ends, unless it is killed."""
    try:
        number = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        return bool(psutil.pid_exists(number))
    except (OSError, ValueError, OverflowError):
        return False
