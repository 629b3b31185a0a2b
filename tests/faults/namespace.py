"""A network of its own for the processes of a test, which can be cut.

Guarantee: nothing but the processes started through `prefix` is in it, and it is gone when the context ends; where the machine
does not allow it, the test is skipped and says so.
"""

import shutil
import subprocess
from pathlib import Path
from types import TracebackType

import pytest


class Namespace:
    """See the module's guarantee. It has a loopback device and nothing else."""

    def __enter__(self) -> "Namespace":
        for tool in ("unshare", "nsenter", "ip"):
            if shutil.which(tool) is None:
                pytest.skip(f"this machine has no {tool}")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        first = self._holder.stdout.readline().strip()
        if first != "ready":
            self._close()
            pytest.skip(f"this machine does not let us make a network namespace: {first}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._holder.kill()
        self._holder.wait(10)
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    @property
    def prefix(self) -> list[str]:
        """Goes before the command of a process that shall live in it."""
        return ["nsenter", f"--net={Path('/proc') / str(self._holder.pid) / 'ns' / 'net'}"]

    def link(self, state: str) -> None:
        """Takes the only link `down` or `up`."""
        subprocess.run([*self.prefix, "ip", "link", "set", "lo", state], check=True, timeout=10)
