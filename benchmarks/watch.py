"""What the processes of a benchmark use: CPU seconds of each side, and memory of all.

Guarantee: a process counts with everything that it starts. Memory that processes share is counted once among them (PSS).
"""

import threading
import time
from typing import Any, NamedTuple

import psutil


class _Sample(NamedTuple):
    at: float
    cpu_s: dict[str, float]
    memory: int


class Watch(threading.Thread):
    """A thread that looks once a second, until its context ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._roots: list[tuple[str, psutil.Process]] = []
        self._cpu_s: dict[tuple[str, int], float] = {}  # of processes that have ended too
        self._samples: list[_Sample] = []
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def add(self, side: str, pid: int) -> None:
        self._roots.append((side, psutil.Process(pid)))

    def run(self) -> None:
        while not self._over.wait(1.0):
            memory = sum(self._look(side, root) for side, root in list(self._roots))
            sides = {side: 0.0 for side, _ in self._cpu_s}
            for (side, _), spent in self._cpu_s.items():
                sides[side] += spent
            self._samples.append(_Sample(time.time(), sides, memory))

    def _look(self, side: str, root: psutil.Process) -> int:
        memory = 0
        try:
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in family:
            try:
                times = process.cpu_times()
                self._cpu_s[side, process.pid] = times.user + times.system
                memory += process.memory_full_info().pss
            except psutil.Error:  # it has ended
                continue
        return memory

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Return CPU seconds of each side per second, and the most memory in bytes, in this span of Unix time."""
        inside = [one for one in self._samples if begin <= one.at <= end]
        if len(inside) < 2:
            return {"cpu_share": {}, "peak_memory": max((one.memory for one in self._samples), default=0)}
        first, last = inside[0], inside[-1]
        spent = {side: last.cpu_s[side] - first.cpu_s.get(side, 0.0) for side in last.cpu_s}
        share = {side: round(seconds / (last.at - first.at), 3) for side, seconds in spent.items()}
        return {"cpu_share": share, "peak_memory": max(one.memory for one in inside)}
