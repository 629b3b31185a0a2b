"""A process that runs code of the user's, seen from the daemon.

Guarantee: it ends with the daemon, however that ends, and nothing that it started outlives it (`protocol.processes.keeper`).
`terminate` begins without an await and goes on by itself, so a cancelled caller leaves nothing half done. It takes no thread.
After half a minute the log names a process that could not be killed, and nobody waits for it any longer.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from protocol.processes.tree import Family, descendants

logger = logging.getLogger(__name__)

_KEEPER = Path(__file__).with_name("keeper.py")
_LOOK_EVERY_S = 0.01
_KEEPER_S = 10.0  # for the keeper to kill everything; it needs milliseconds
_KERNEL_S = 20.0  # for the kernel to let go what was killed


class KeptProcess:
    """A command with its keeper, or `OSError`. When it is terminated it has `grace_s` between SIGTERM and SIGKILL. `how` are
    options of `subprocess.Popen`."""

    def __init__(self, command: list[str], grace_s: float = 0.0, **how: Any) -> None:
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), str(grace_s)]
        self._grace_s = grace_s
        self._process = subprocess.Popen([*keeper, *command], start_new_session=True, **how)
        self.resident_bytes = Family(self._process.pid).resident_bytes
        self._ending: asyncio.Task[int | None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the keeper. The other processes are below it."""
        return self._process.pid

    async def exited(self, within_s: float) -> int | None:
        """The exit status, negative for a signal, or None if the process does not end in time."""
        deadline = time.monotonic() + within_s
        while (status := self._process.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(_LOOK_EVERY_S)
        return status

    def terminate(self) -> "asyncio.Task[int | None]":
        """The task is done when the process and everything that it started are gone. It returns None if that failed."""
        if self._ending is None:
            self._process.send_signal(signal.SIGTERM)
            self._ending = asyncio.ensure_future(self._ended())
        return self._ending

    async def _ended(self) -> int | None:
        status = await self.exited(self._grace_s + _KEEPER_S)
        if status is None:  # the keeper is stopped, or waits in vain
            for pid in reversed(descendants(self.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = await self.exited(_KERNEL_S)
        if status is None:
            logger.error(
                "process %d was killed and does not end; the kernel waits for something (often a network disk) on its behalf",
                self.pid,
            )
        return status
