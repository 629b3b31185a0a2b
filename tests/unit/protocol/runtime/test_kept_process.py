"""Kept processes: real ones, whose children leave their session, their group and their parent."""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.runtime import child as kept_module
from protocol.runtime.child import KeptProcess
from tests.unit.producer.loop import asynchronous, until

DAEMON = """
import os, subprocess, sys, time
def leave_a_daemon(file):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(file, "w") as told:
                told.write(f"{os.getpid()}\\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
leave_a_daemon(sys.argv[1])
while not os.path.getsize(sys.argv[1]):
    time.sleep(0.01)
"""


def kept(program: str, *arguments: object, grace_s: float = 0.0) -> KeptProcess:
    return KeptProcess([sys.executable, "-c", program, *map(str, arguments)], grace_s)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """Where a daemon writes its id. It is ended after a test that fails."""
    file = tmp_path / "daemon"
    file.touch()
    yield file
    said = file.read_text()
    if said and not is_gone(int(said)):
        os.kill(int(said), signal.SIGKILL)
        raise AssertionError("the daemon was left")


async def daemon_of(told: Path) -> psutil.Process:
    said = told.read_text
    await until(lambda: said().endswith("\n"))
    return psutil.Process(int(said()))


def is_gone(pid: int) -> bool:
    """Dead; whoever inherited it may not have reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def gone(process: psutil.Process) -> None:
    await until(lambda: is_gone(process.pid))


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os; os.abort()", -6),
    ],
)
def test_the_keeper_ends_as_the_kept_process_does(program: str, status: int) -> None:
    assert asyncio.run(kept(program).exited(30)) == status


def test_a_keeper_closes_what_is_open_and_counts_to_no_limit() -> None:
    keeper = runpy.run_path(str(Path(kept_module.__file__).with_name("keeper.py")))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.closerange = None  # type: ignore[assignment]
        keeper["_close_others"]()
        left = set(os.listdir("/proc/self/fd"))
        os._exit(0 if left <= {"0", "1", "2", "3"} else 1)  # 3 is the one that lists
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_command_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(KeptProcess(["/no/such/program"]).exited(30)) == 127
    assert "/no/such/program: No such file or directory" in capfd.readouterr().err


@asynchronous
async def test_a_daemon_ends_with_the_process_that_left_it(told: Path) -> None:
    seen = told.with_name("seen")
    process = kept(DAEMON + "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\nraise SystemExit(3)", told, seen)
    daemon = await daemon_of(told)
    seen.touch()
    assert await process.exited(30) == 3
    assert not daemon.is_running()


@asynchronous
async def test_a_daemon_counts_and_ends_with_the_process_that_is_ended(told: Path) -> None:
    process = kept(DAEMON + "time.sleep(600)", told)
    daemon = await daemon_of(told)
    await until(lambda: daemon.ppid() == process.pid)
    assert process.resident_bytes() > sum(p.memory_info().rss for p in (daemon, psutil.Process(process.pid))) // 2
    assert await process.terminate() == -signal.SIGKILL
    assert not daemon.is_running()
    assert process.terminate() is process.terminate()


@asynchronous
async def test_orphans_are_reaped(told: Path) -> None:
    forks = "for _ in range(20):\n    if os.fork() == 0:\n        os.fork()\n        os._exit(0)\n"
    program = f"import os, time\n{forks}time.sleep(600)"

    process = kept(program)
    await until(lambda: len(psutil.Process(process.pid).children()) == 1)
    (worker,) = psutil.Process(process.pid).children()
    zombies = [psutil.STATUS_ZOMBIE] * 20  # its own, which it does not wait for
    await until(lambda: [child.status() for child in worker.children()] == zombies)
    await until(lambda: len(psutil.Process(process.pid).children()) == 1)
    await process.terminate()
    assert not worker.is_running()


@pytest.mark.long
def test_everything_ends_when_the_daemon_is_killed(told: Path) -> None:
    starter = "import sys\nfrom protocol.runtime.child import KeptProcess\n"
    starter += "KeptProcess([sys.executable, '-c', *sys.argv[1:]])\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", starter, DAEMON + "time.sleep(600)", str(told)], stdin=subprocess.PIPE
    )

    async def body() -> None:
        daemon = await daemon_of(told)
        (keeper,) = psutil.Process(process.pid).children()
        (worker,) = [child for child in keeper.children() if child != daemon]
        process.kill()
        for each in (daemon, worker, keeper):
            await gone(each)

    try:
        asyncio.run(body())
    finally:
        process.kill()
        process.communicate()


@asynchronous
async def test_a_grace_lets_the_process_end_by_itself(tmp_path: Path, told: Path) -> None:
    ready = tmp_path / "ready"
    kind = f"import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nopen({str(ready)!r}, 'w')\n"
    kind += "while True:\n    time.sleep(0.02)"  # a signal just before a sleep does not end it

    process = kept(DAEMON + kind, told, grace_s=60.0)
    daemon = await daemon_of(told)
    await until(ready.exists)
    assert await process.terminate() == 7
    assert not daemon.is_running()


@asynchronous
async def test_who_ignores_the_grace_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(sys.argv[1], 'w')\ntime.sleep(600)"

    process = kept(deaf, ready, grace_s=0.1)
    await until(ready.exists)
    assert await process.terminate() == -signal.SIGKILL


@asynchronous
async def test_a_keeper_that_was_stopped_is_no_obstacle(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.runtime.child._KEEPER_S", 0.1)

    process = kept(DAEMON + "time.sleep(600)", told)
    daemon = await daemon_of(told)
    await until(lambda: daemon.ppid() == process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    assert await process.terminate() == -signal.SIGKILL
    await gone(daemon)


@asynchronous
async def test_what_does_not_die_is_said_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("protocol.runtime.child._KEEPER_S", 0.01)
    monkeypatch.setattr("protocol.runtime.child._KERNEL_S", 0.01)

    process = kept("import time; time.sleep(600)")
    poll = process._process.poll
    monkeypatch.setattr(process._process, "poll", lambda: None)
    assert await process.terminate() is None
    assert f"process {process.pid} was killed and does not end" in caplog.text
    await until(lambda: poll() is not None)


def test_a_kept_process_does_what_a_process_does() -> None:
    """Its signals are not blocked, and ignored only where they are here (`nohup` does that); it leads a session."""
    program = textwrap.dedent(
        f"""
        import os, signal
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        ignored = int(open("/proc/self/status").read().split("SigIgn:")[1].split()[0], 16)
        assert ignored & ~{ignored_signals()} == 0, hex(ignored)
        assert os.getsid(0) == os.getpid() != os.getppid()
        """
    )
    assert asyncio.run(kept(program).exited(30)) == 0


def ignored_signals() -> int:
    return int(Path("/proc/self/status").read_text().split("SigIgn:")[1].split()[0], 16)
