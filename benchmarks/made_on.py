"""Where, when and how a result was measured.

Guarantee: each report that a benchmark writes, and each line of its finished runs, has the machine, the commit, the command
and the time. A commit whose files were changed ends with `-dirty`.
"""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime


def made_on() -> dict[str, str]:
    """Return `machine`, `commit`, `command` and `at`, the time in UTC. Call it when the measurement begins."""
    import torch  # takes seconds, and not every benchmark needs it

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    described = ("git", "describe", "--always", "--dirty", "--exclude=*")
    return {
        "machine": f"{gpu}{os.cpu_count()} CPUs, {platform.platform()}",
        "commit": subprocess.check_output(described, text=True).strip(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }
