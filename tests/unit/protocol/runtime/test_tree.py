"""The memory of a process and of what it started, read often and cheaply."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.runtime import processes as tree
from protocol.runtime.processes import Family, resident_bytes


def test_new_descendants_are_looked_for_more_rarely_the_more_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of many cores is not read at the pace of the memory."""
    now, walks = [0.0], []

    def walk(pid: int) -> tuple[list[int], int]:
        walks.append(now[0])
        return [os.getpid()], num_threads

    monkeypatch.setattr(tree, "_walk", walk)
    counts = {}
    for num_threads in (4, 100, 10_000):
        family, now[0] = Family(os.getpid(), lambda: now[0]), 0.0
        walks.clear()
        for look in range(101):
            now[0] = look * 0.1
            assert family.resident_bytes() > 0
        counts[num_threads] = len(walks)
    assert counts == {4: 101, 100: pytest.approx(11, abs=1), 10_000: pytest.approx(6, abs=1)}


def test_memory_is_that_of_all_of_them_also_of_those_that_a_thread_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, threading\n"
        "def start(): subprocess.Popen([sys.executable, '-c', 'import sys; print(1, flush=True); sys.stdin.read()'])\n"
        "thread = threading.Thread(target=lambda: (start(), sys.stdin.read()))\n"
        "thread.start()\nthread.join()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"1\n"
        assert len(tree.descendants(process.pid)) == 2
        own = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert Family(process.pid).resident_bytes() > own
        assert resident_bytes(process.pid) > own
        process.stdin.close()
