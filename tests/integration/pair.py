"""The two daemons as processes, for tests: started, watched through their logs, killed and started again."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.integration.warm import WarmProcess

START_S = 240.0
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class Daemon:
    """One `rl-producer` or `rl-trainer` process whose output goes to a file.

    Args:
        variables: of its environment, beside those of this process.
        network: the namespace that it lives in, as a file of /proc; None: that of this process.
        python: see `WarmProcess`.
    """

    def __init__(
        self,
        module: str,
        log: Path,
        *arguments: str,
        spawns: bool = False,
        variables: Mapping[str, str] = _NO_VARIABLES,
        network: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self._log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | variables
        arguments = (*arguments, "--gpu", "cpu") if module == "slipstream" else ("--gpu", "cpu", *arguments)
        self.process = WarmProcess(module, arguments, log, environment, spawns=spawns, network=network, python=python)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        return f"{self._log.name} ended with {self.process.returncode}:\n{self.output[-3000:]}"

    def wait_for(self, pattern: str, timeout_s: float = START_S, *, beside: "Daemon | None" = None) -> re.Match[str]:
        """Until the log matches; fails if the process, or the one it needs beside it, ends or the time is over first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.output)
            if found:
                return found
            assert not ended, self.last_words
            assert beside is None or beside.process.poll() is None, beside.last_words
            time.sleep(0.1)
        raise AssertionError(f"{self._log.name}: no {pattern!r} within {timeout_s} s:\n{self.output[-3000:]}")

    def family(self) -> list[psutil.Process]:
        """The process and everything it started."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def kill(self) -> None:
        """SIGKILL to this one process, as the kernel's out-of-memory killer would."""
        self.process.kill()
        self.process.wait(60)

    def end(self, timeout_s: float = 120.0) -> int:
        """Waits for the process to end by itself and returns its exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Whatever state it is in, nothing of it stays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)  # at the end the interpreter visits millions of objects
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(60)


def run_pair(folder: Path, config: str, daemons: list[Daemon]) -> None:
    """Both from start to end."""
    for module, name in (("producer.app.cli", "producer"), ("consumer.app.cli", "trainer")):
        daemons.append(Daemon(module, folder / f"{name}.log", "--config", config))
    producer, trainer = daemons
    end_well(trainer, producer)


def end_well(trainer: Daemon, producer: Daemon, timeout_s: float = 280.0) -> None:
    """Until both have ended, the trainer first; a producer that fails ends the wait."""
    deadline = time.monotonic() + timeout_s
    while trainer.process.poll() is None:
        assert producer.process.poll() in (None, 0), producer.last_words
        assert time.monotonic() < deadline, f"no end within {timeout_s} s:\n{trainer.output[-3000:]}"
        time.sleep(0.1)
    assert trainer.process.returncode == 0, trainer.last_words
    assert producer.end() == 0, producer.last_words


def gone(processes: list[psutil.Process], timeout_s: float = 60.0) -> bool:
    """Whether all of these have ended within the time."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
