"""A network of its own for the processes of a test, which can be cut.

Guarantee: nothing but the processes that enter `path` is in it, and it is gone when the context ends; where the machine
does not allow it, the test is skipped and says so.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_MAKE = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"]


@dataclass
class Network:
    path: Path  # for a process that shall live in it to enter

    def link(self, state: str) -> None:
        """Takes the only link `down` or `up`."""
        subprocess.run(["nsenter", f"--net={self.path}", "ip", "link", "set", "lo", state], check=True, timeout=10)


@contextmanager
def network_namespace() -> Iterator[Network]:
    """It has a loopback device and nothing else."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"this machine has no {tool}")
    with subprocess.Popen(_MAKE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as holder:
        try:
            assert holder.stdout is not None
            first = holder.stdout.readline().strip()
            if first != "ready":
                pytest.skip(f"this machine does not let us make a network namespace: {first}")
            yield Network(Path(f"/proc/{holder.pid}/ns/net"))
        finally:
            holder.kill()
