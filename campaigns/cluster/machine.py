"""A run under Ray on this machine, for tests: its nodes, its command, and ways to kill what runs.

Guarantee: everything ends with the context, and nothing else is touched.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from protocol.runtime import json_lines as rotated_lines

REPOSITORY = Path(__file__).parents[2]
_SCRIPTED = Path(__file__).with_name("scripted")


class Nodes:
    """`campaigns.cluster.nodes`, spoken to."""

    def __init__(self, count: int, cpus: int, log: Path, environment: dict[str, str]) -> None:
        self.again = lambda: Nodes(count, cpus, log, environment)
        command = [sys.executable, "-m", "campaigns.cluster.nodes", str(count), str(cpus)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self.address = str(self._answer()["address"])

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nodes have ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


class ClusterRun:
    """One run in `folder`, whose `run.yaml` is there."""

    def __init__(self, folder: Path, nodes: Nodes, environment: dict[str, str]) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.nodes = nodes
        self._environment = environment | {"RAY_ADDRESS": nodes.address}

    def lose_ray(self) -> None:
        """Head and nodes are killed; there is another Ray afterwards."""
        self.nodes.say("crash")
        self.nodes.close()
        self.nodes = self.nodes.again()
        self._environment |= {"RAY_ADDRESS": self.nodes.address}

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """The command with these arguments; what it says is in `cluster.log`."""
        with (self.folder / "cluster.log").open("ab") as log:
            command = [sys.executable, "-m", "slipstream", "cluster", *arguments]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=self._environment)

    def command(self, *arguments: str, code: int = 0, timeout_s: float = 300.0) -> str:
        """The same, until it ends; what it said."""
        command = [sys.executable, "-m", "slipstream", "cluster", *arguments]
        ended = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, env=self._environment
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.command("status", "--json", "--config", "run.yaml"))
        return found

    def processes(self) -> dict[str, psutil.Process]:
        """Of the daemons that run, by name."""
        found = {}
        for daemon in self.report()["daemons"]:
            if daemon["phase"] == "running" and daemon["pid"]:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                    found[daemon["name"]] = psutil.Process(daemon["pid"])
        return found

    def step(self) -> int:
        return newest_step(self.run_dir)

    def wait_for_steps(self, more: int, timeout_s: float = 300.0) -> float:
        """Until so many more were taken; the seconds that it took until the first."""
        before, began, first = self.step(), time.monotonic(), 0.0
        while (step := self.step()) < before + more:
            if step > before and not first:
                first = time.monotonic() - began
            assert time.monotonic() - began < timeout_s, self.words()
            time.sleep(0.1)
        return first or time.monotonic() - began

    def words(self) -> str:
        """What was said so far, for a test that fails."""
        logs = [
            self.folder / "cluster.log",
            self.run_dir / "cluster/events.log",
            self.run_dir / "cluster/trainer.log",
        ]
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())


def newest_step(run_dir: Path) -> int:
    """0 before the first."""
    steps = rotated_lines.read(run_dir / "steps.jsonl")
    return int(steps[-1]["step"]) if steps else 0


def raylet_of(process: psutil.Process) -> int:
    """The process of the node on which a daemon runs."""
    return next(parent.pid for parent in process.parents() if parent.name() == "raylet")


def rank_of(trainer: psutil.Process) -> psutil.Process:
    """Another rank than the first."""
    return next(child for child in trainer.children() if child.cmdline() == trainer.cmdline())


def eventually(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@contextlib.contextmanager
def cluster_run(
    folder: Path, num_nodes: int = 3, cpus: int = 3, *, scripted: bool = True, **environment: str
) -> Iterator[ClusterRun]:
    """Nodes for the run in `folder`, whose producers have a scripted engine, or vLLM."""
    paths = os.pathsep.join([str(REPOSITORY), *([str(_SCRIPTED)] if scripted else [])])
    everywhere = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    run = ClusterRun(folder, Nodes(num_nodes, cpus, folder / "nodes.log", everywhere | environment), everywhere)
    try:
        yield run
    finally:
        run.nodes.close()


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
