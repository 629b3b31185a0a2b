"""Where, when and how a result was measured.

Guarantee: each report that a benchmark writes, and each line of its finished runs, has the machine, the commit, the command
and the time (`gpu_check`, whose parts describe the machine, has a report of its own). A commit whose files were changed ends
with `-dirty`.
"""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime


def made_on() -> dict[str, str]:
    """Return `machine`, `commit`, `command` and `at`, the time in UTC. Call it when the measurement begins."""
    return {
        "machine": f"{_first_gpu()}{os.cpu_count()} CPUs, {platform.platform()}",
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }


def _commit() -> str:
    """Return the commit that is checked out; `unknown` in a copy without git, where results are wanted, too."""
    described = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        return subprocess.check_output(described, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _first_gpu() -> str:
    """Return the name of GPU 0, as NVML has it: a context of CUDA would take memory, and some benchmarks fork."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return f"{pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))}, "
    except Exception:  # no such library, no driver, no GPU
        return ""
