"""Daemons that start at once: forks of a process that has imported their heavy libraries, one per test process and role.

Guarantee: a fork runs the command as `python -m` does, with the arguments, environment and working directory of its
starter, as the leader of a session of its own; all of them end with the process that started them.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.fleet import Zygote

_zygotes: dict[str, Zygote] = {}


class WarmProcess:
    """A running daemon, with what tests need of `subprocess.Popen`.

    Args:
        spawns: a producer lets vLLM start its engine core, and a trainer its other ranks, in their own way, which takes
            longer; see `forked_cores` and `forked_ranks`.
    """

    def __init__(
        self, module: str, arguments: list[str], log: Path, environment: dict[str, str], *, spawns: bool = False
    ) -> None:
        log.touch()
        is_trainer = module.startswith(("consumer.", "benchmarks.")) or module.endswith("_trainer")
        role = "trainer" if is_trainer else "producer"
        self._daemon = _zygote(f"tests.integration.warm_{role}").start(
            [module, *arguments], log=log, module=module, environment=environment, cwd=os.getcwd(), spawns=spawns
        )
        self.pid = self._daemon.pid

    @property
    def returncode(self) -> int | None:
        return self._daemon.poll()

    def poll(self) -> int | None:
        return self._daemon.poll()

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self._daemon.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a warm process", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        self._daemon.send(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_to_its_end(module: str, arguments: list[str], log: Path, timeout_s: float) -> str:
    """What a command that ends well has said."""
    command = WarmProcess(module, arguments, log, {})
    try:
        code = command.wait(timeout_s)
    finally:
        command.kill()
    output = log.read_text(errors="replace")
    assert code == 0, output[-3000:]
    return output


def _zygote(child: str) -> Zygote:
    if child not in _zygotes:
        zygote = _zygotes[child] = Zygote(child, Path(os.devnull), Path(tempfile.gettempdir()))
        atexit.register(zygote.close)
        zygote.wait_until_ready()
    return _zygotes[child]


def run(request: dict[str, Any]) -> int:
    """In a fork: becomes the command."""
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])  # what the imports have set stays, as in a process that imports itself
    sys.path[:0] = [
        place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path
    ]
    sys.orig_argv = [sys.executable, "-m", *request["argv"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    return 0
