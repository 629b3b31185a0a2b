"""Daemons that start at once: forks of a process that has imported their heavy libraries, one per session and role.

Guarantee: a fork runs the command as `python -m` does, with the arguments, environment and working directory of its
starter, as the leader of a session of its own; all of them end with the process that started them.
"""

import atexit
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.chaos.fleet import Role, Zygote
from tests.integration.shared_zygote import SharedZygote

_CLONE_NEWNET = 0x40000000  # of sched.h
_zygotes: dict[Role, Zygote] = {}


class WarmProcess:
    """A running daemon, with what tests need of `subprocess.Popen`.

    Args:
        spawns: a producer lets vLLM start its engine core, and a trainer its other ranks, in their own way, which takes
            longer; see `forked_cores` and `forked_ranks`.
        python: what it takes for its interpreter, where it starts itself again.
        network: the namespace that it enters first, as a file of /proc.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str],
        *,
        spawns: bool = False,
        network: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        log.touch()
        is_trainer = module.startswith(("consumer.", "benchmarks.", "slipstream")) or module.endswith("_trainer")
        self._daemon = zygote("trainer" if is_trainer else "producer").start(
            [module, *arguments],
            log=log,
            module=module,
            environment=environment,
            cwd=os.getcwd(),
            spawns=spawns,
            network=None if network is None else str(network),
            python=python,
        )
        self.pid = self._daemon.pid

    @property
    def returncode(self) -> int | None:
        return self._daemon.poll()

    def poll(self) -> int | None:
        return self._daemon.poll()

    def wait(self, timeout: float) -> int:
        return self._daemon.wait(timeout)

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


def zygote(role: Role) -> Zygote:
    """That of this process, which it starts once."""
    if role not in _zygotes:
        started = _zygotes[role] = SharedZygote(f"tests.integration.warm_{role}")
        atexit.register(started.close)
        started.wait_until_ready()
    return _zygotes[role]


def run(request: dict[str, Any]) -> int:
    """In a fork: becomes the command."""
    if request["network"] is not None:
        _enter(request["network"])
    os.chdir(request["cwd"])
    sys.path[:0] = [
        place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path
    ]
    sys.executable = request.get("python", sys.executable)
    sys.orig_argv = [sys.executable, "-m", *request["argv"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    return 0


def _enter(network: str) -> None:
    """As `nsenter --net` does; Python has `os.setns` from 3.12 on."""
    with open(network, "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")
