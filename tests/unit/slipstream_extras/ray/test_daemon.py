"""The actor of a command, without Ray, around a script in place of the daemon."""

import asyncio
import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from slipstream_extras.ray import daemon as module
from slipstream_extras.ray.daemon import Daemon, Output
from slipstream_extras.ray.manager import Events
from slipstream_extras.ray.plan import DaemonReport
from tests.integration.pair import gone
from tests.unit.slipstream_extras.ray.builders import plan

Make = Callable[..., Daemon]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A daemon of this name whose command is the script."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_place", lambda: ("10.0.0.6", [3]))

    def made(script: str, name: str = "producer-1") -> Daemon:
        def command(plan: object, name: str, gpus: object, folder: Path, keys: Path) -> list[str]:
            return [sys.executable, "-c", script, str(keys), str(gpus)]

        monkeypatch.setattr(module, "daemon_command", command)
        return Daemon(msgspec.json.encode(plan(tmp_path / "run")), name)

    return made


async def says(daemon: Daemon, lines: int) -> DaemonReport:
    """Until it has written so many lines, and its process is known."""
    until = time.monotonic() + 60
    while len(await daemon.last_lines(9)) < lines or not (found := await reports(daemon, "running")).pid:
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
    return found


async def reports(daemon: Daemon, phase: str) -> DaemonReport:
    """Until it is in this phase."""
    until = time.monotonic() + 60
    while (found := msgspec.json.decode(await daemon.report(), type=DaemonReport)).phase != phase:
        assert time.monotonic() < until, found
        await asyncio.sleep(0.02)
    return found


def test_a_configuration_error_stays_down_with_its_message(make: Make) -> None:
    async def scenario() -> None:
        daemon = make("import sys; print('rl-producer: error: run.yaml:3: lora.r'); sys.exit(78)")
        assert (await reports(daemon, "new")).node == "10.0.0.6"
        await daemon.begin({})
        found = await reports(daemon, "ended")
        assert (found.exit_code, found.starts, found.message) == (78, 1, "rl-producer: error: run.yaml:3: lora.r")
        assert await daemon.last_lines(5) == ["rl-producer: error: run.yaml:3: lora.r"]

    asyncio.run(scenario())


def test_keys_are_private_and_gone_with_the_command(make: Make, tmp_path: Path) -> None:
    async def scenario() -> None:
        script = "import os, sys, time; f = sys.argv[1]; print(f, os.stat(f).st_mode & 511, *("
        script += "[n, os.stat(f'{f}/{n}').st_mode & 511] for n in os.listdir(f)), sys.argv[2], os.environ['OMP_NUM_THREADS'])"
        daemon = make(script)
        await daemon.begin({"producer-1.secret": b"s"})
        await reports(daemon, "ended")
        [line] = await daemon.last_lines(9)
        folder, rest = line.split(" ", 1)
        assert rest == f"{0o700} ['producer-1.secret', {0o600}] [3] 4"
        assert not list(Path(folder).parent.glob(Path(folder).name))

    asyncio.run(scenario())


@pytest.mark.long
def test_one_that_was_killed_comes_back_and_one_that_is_drained_does_not(make: Make) -> None:
    async def scenario() -> None:
        script = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('up', flush=True)\n"
        script += "while True: time.sleep(0.02)"  # a signal just before a sleep does not end it
        daemon = make(script)
        await daemon.begin({})
        await daemon.begin({})
        found = await says(daemon, 1)
        assert found.pid is not None
        os.kill(found.pid, 9)
        paused = await reports(daemon, "pausing")
        assert paused.exit_code == -9
        assert "killed by SIGKILL; starts again in 1 s" in paused.message
        assert (await says(daemon, 2)).starts == 2
        await daemon.drain()
        found = await reports(daemon, "ended")
        assert (found.exit_code, found.draining) == (0, True)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_full_disk_or_a_log_that_somebody_deletes_is_no_end(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full, opened = iter([True]), Output.opened

    def fails(self: Output) -> int:
        if next(is_full, False):
            raise OSError(errno.ENOSPC, "No space left on device", "x.log")
        return opened(self)

    async def scenario() -> None:
        monkeypatch.setattr(Output, "opened", fails)
        daemon = make("import os, sys; os.unlink(os.readlink('/proc/self/fd/1')); sys.exit(75)")
        await daemon.begin({})
        assert "cannot be started: [Errno 28] No space left on device" in (await reports(daemon, "pausing")).message
        await reports(daemon, "running")
        assert "exit status 75; starts again" in (await reports(daemon, "pausing")).message
        await daemon.drain()
        await reports(daemon, "ended")

    asyncio.run(scenario())


def test_one_whose_keys_find_no_room_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(keys: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp")

    async def scenario() -> None:
        monkeypatch.setattr(module, "_private_files", full)
        daemon = make("print('up')")
        await daemon.begin({})
        found = await reports(daemon, "ended")
        assert found.exit_code == 70
        assert "No space left on device" in found.message

    asyncio.run(scenario())


@pytest.mark.long
def test_one_that_does_not_end_is_killed_with_what_it_started(make: Make) -> None:
    async def scenario() -> None:
        script = "import signal, subprocess, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
        script += (
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        )
        daemon = make(script + "print(child.pid, flush=True)\ntime.sleep(600)")
        await daemon.begin({})
        found = await says(daemon, 1)
        child = psutil.Process(int((await daemon.last_lines(1))[0]))
        await daemon.drain()
        assert found.pid is not None
        assert psutil.pid_exists(found.pid)
        await daemon.kill()
        assert (await reports(daemon, "ended")).exit_code == -9
        assert await asyncio.to_thread(gone, [child])

    asyncio.run(scenario())


def test_one_that_never_began_or_that_pauses_is_drained_at_once(make: Make) -> None:
    async def scenario() -> None:
        daemon = make("raise SystemExit(75)")
        await daemon.drain()
        await reports(daemon, "ended")
        daemon = make("raise SystemExit(75)")
        await daemon.begin({})
        await reports(daemon, "pausing")
        await daemon.drain()
        await reports(daemon, "ended")

    asyncio.run(scenario())


def test_a_trainer_waits_for_the_one_before_and_gives_up_at_its_deadline(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    async def scenario() -> None:
        with (run_dir / "journal.sqlite.lock").open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            daemon = make("print('trains')", "trainer")
            await daemon.begin({})
            found = await reports(daemon, "locked")
            assert "another trainer still works in" in found.message
        found = await reports(daemon, "ended")
        assert found.exit_code == 0
        monkeypatch.setattr(module, "LOCK_DEADLINE_S", 0.2)
        with (run_dir / "journal.sqlite.lock").open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            daemon = make("print('trains')", "trainer")
            await daemon.begin({})
            found = await reports(daemon, "ended")
            assert (found.exit_code, found.starts) == (73, 0)

    asyncio.run(scenario())


def write(output: Output, text: str) -> None:
    file = output.opened()
    os.write(file, text.encode())
    os.close(file)


def test_the_last_words_are_the_error_of_the_newest_process_or_its_last_lines(tmp_path: Path) -> None:
    output = Output(tmp_path / "daemon" / "trainer.log")
    write(output, "old: error: not this\n")
    write(output, "begins\nrl-trainer: error: run.yaml:3: lora.r: too large\n  make it smaller\n")
    assert output.last_words() == "rl-trainer: error: run.yaml:3: lora.r: too large\n  make it smaller"
    write(output, "".join(f"line {number}\n" for number in range(20)))
    assert output.last_words() == "\n".join(f"line {number}" for number in range(14, 20))
    assert output.last_lines(2) == ["line 18", "line 19"]
    write(output, "")
    assert output.last_words() == ""
    assert (tmp_path / "daemon").stat().st_mode & 0o077 == 0
    assert (tmp_path / "daemon/trainer.log").stat().st_mode & 0o077 == 0


def test_two_files_at_most_and_a_process_that_goes_on_writing(tmp_path: Path) -> None:
    output = Output(tmp_path / "x.log", max_bytes=100)
    file = output.opened()
    for number in range(100):
        os.write(file, f"line {number}\n".encode())
        output.rotate()
    os.close(file)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 120
    assert output.last_lines(3) == ["line 97", "line 98", "line 99"]


def test_a_full_disk_and_a_file_that_somebody_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = Output(tmp_path / "x.log", max_bytes=3)
    write(output, "words\n")
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "copyfile", full)
        output.rotate()
    assert output.last_words() == "words"
    (tmp_path / "x.log").unlink()
    output.rotate()
    assert (output.last_words(), output.last_lines(3)) == ("", [])


def test_events_are_lines_and_nobody_gets_one_twice(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.log")
    for number in range(3):
        events.add(f"event {number}\nand \x1b[2J more")
    count, lines = events.since(1)
    assert count == 3
    assert [line.split(" ", 1)[1] for line in lines] == [f"event {n} | and \\x1b[2J more" for n in (1, 2)]
    assert events.since(3) == (3, [])
    assert len(events.last_lines(2)) == 2
    for number in range(2000):
        events.add(str(number))
    assert len(events.since(0)[1]) == 1000
    assert events.since(2002)[1][0].endswith(" 1999")
    assert Events(tmp_path / "events.log").last_lines(1)[0].endswith(" 1999"), "the file outlives its manager"
