"""Both daemons as children of one process: whose exit code counts, what starts again, and what Ctrl-C does."""

import asyncio
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.runtime import supervisor
from slipstream import pair
from slipstream.pair import PRODUCER, TRAINER, Pair

FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)"
# The signal may come while `up` is being printed, when print refuses to be called again.
POLITE = (
    f"import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'bye\\n'), os._exit(0)))\n{FOREVER}"
)
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}"


class Terminal:
    """Keeps what is shown, and lets a test act on it."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.react: Callable[[tuple[str, str]], object] = lambda line: None

    def __call__(self, name: str, line: str) -> None:
        self.shown.append((name, line))
        self.react((name, line))


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def started(trainer: str, producer: str, terminal: Terminal) -> Pair:
    first, second = ([sys.executable, "-S", "-c", textwrap.dedent(code)] for code in (trainer, producer))
    return Pair(first, second, terminal, 20.0)


def finished(running: Pair, within_s: float = 60) -> int:
    return asyncio.run(asyncio.wait_for(running.run(), within_s))


def ended(trainer: str, producer: str, terminal: Terminal) -> int:
    return finished(started(trainer, producer, terminal))


@pytest.mark.long
def test_the_exit_code_is_the_trainers_and_its_producer_goes_with_it(terminal: Terminal) -> None:
    assert ended("print('no signal'); raise SystemExit(67)", POLITE, terminal) == ExitCode.NO_SIGNAL
    assert (TRAINER, "no signal") in terminal.shown


@pytest.mark.long
def test_a_producer_ends_by_itself_after_a_run(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_FOLLOW_S", 20.0)
    assert ended("pass", "import time; time.sleep(0.3); print('finished')", terminal) == ExitCode.OK
    assert (PRODUCER, "finished") in terminal.shown


@pytest.mark.long
def test_a_producer_that_was_killed_starts_again(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_FOLLOW_S", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.1)
    mark = tmp_path / "second"
    producer = f"""
        import os, pathlib, time
        mark = pathlib.Path({str(mark)!r})
        if mark.with_name("first").exists():
            mark.touch()
            time.sleep(60)
        mark.with_name("first").touch()
        os.kill(os.getpid(), 9)
        """
    trainer = f"import os, time\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.05)"
    assert ended(trainer, producer, terminal) == ExitCode.OK
    assert [line for name, line in terminal.shown if "SIGKILL" in line and name == PRODUCER]


@pytest.mark.long
def test_a_producer_that_no_start_can_help_ends_the_run_with_its_code(terminal: Terminal, tmp_path: Path) -> None:
    mark = tmp_path / "up"
    trainer = POLITE.replace("print('up', flush=True)", f"open({str(mark)!r}, 'w')")
    producer = f"import os, time\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.02)\nraise SystemExit(78)"
    assert ended(trainer, producer, terminal) == ExitCode.CONFIG
    assert (TRAINER, "bye") in terminal.shown


@pytest.mark.long
def test_ctrl_c_asks_both_to_end(terminal: Terminal) -> None:
    running = started(POLITE, POLITE, terminal)

    def stop_when_both_are_up(_: tuple[str, str]) -> None:
        if {(TRAINER, "up"), (PRODUCER, "up")} <= set(terminal.shown) and (TRAINER, "bye") not in terminal.shown:
            terminal.react = lambda line: None
            running.stop()

    terminal.react = stop_when_both_are_up
    assert finished(running) == ExitCode.OK
    assert {(TRAINER, "bye"), (PRODUCER, "bye")} <= set(terminal.shown)


def test_ctrl_c_twice_kills_both(terminal: Terminal) -> None:
    running = started(STUBBORN, POLITE, terminal)

    def stop_twice(line: tuple[str, str]) -> None:
        if line == (TRAINER, "up"):
            running.stop()
            asyncio.get_running_loop().call_later(0.3, running.stop)

    terminal.react = stop_twice
    assert finished(running, 15) == ExitCode.INTERRUPTED


@pytest.mark.long
def test_a_producer_that_hangs_while_it_starts_does_not_keep_a_refused_run(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pair, "_PRODUCER_GRACE_S", 0.2)
    mark = tmp_path / "up"
    producer = STUBBORN.replace("print('up', flush=True)", f"open({str(mark)!r}, 'w')")
    trainer = f"import os, time\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.02)\nraise SystemExit(78)"
    first, second = ([sys.executable, "-S", "-c", textwrap.dedent(code)] for code in (trainer, producer))
    assert finished(Pair(first, second, terminal), 60) == ExitCode.CONFIG


@pytest.mark.long
def test_a_line_without_an_end_is_shown_in_parts(terminal: Terminal) -> None:
    assert ended("print('x' * 300_000, end='')", "pass", terminal) == ExitCode.OK
    parts = [line for name, line in terminal.shown if name == TRAINER]
    assert "".join(parts) == "x" * 300_000
    assert len(parts) > 1
