"""Signals to processes of ours: whatever Python does when one comes, the process ends, or knows that it came."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.runtime import signals
from protocol.runtime.signals import StopFlag
from tests.moments import MOMENTS

REPOSITORY = Path(__file__).parents[4]
BOTH = [signal.SIGTERM, signal.SIGINT]

BEGINNING = """
import asyncio, logging, os, signal, sys, time
from pathlib import Path
from protocol.errors import ExitCode
from protocol.runtime import logs, signals
from tests.moments import MOMENTS

moment, number = sys.argv[1], signal.Signals(int(sys.argv[2]))

def come():
    MOMENTS[moment](number)
"""


def ended(
    program: str, moment: str = "finalizer", number: int = signal.SIGTERM, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BEGINNING + textwrap.dedent(program), moment, str(int(number))]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", BOTH)
def test_a_process_ends_whatever_python_does_when_the_signal_comes(moment: str, number: int) -> None:
    shown = ended(
        """
        signals.end_on_signals(ExitCode.NO_ANSWER)
        print("said", end="")
        come()
        print("still here")
        time.sleep(60)
        """,
        moment,
        number,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (ExitCode.NO_ANSWER, "said", "")


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_flag_is_set_whatever_python_does_when_the_signal_comes(moment: str) -> None:
    shown = ended(
        """
        stop = signals.StopFlag()
        come()
        print(stop(), flush=True)
        try:
            stop.sleep(60)
        except KeyboardInterrupt:
            print("in the work")
        come()
        print("still here")
        """,
        moment,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (ExitCode.INTERRUPTED, "True\nin the work\n", "")


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("loop", ["asyncio.new_event_loop()", "__import__('uvloop').new_event_loop()"])
def test_a_loop_hears_of_a_signal_whatever_python_does_when_it_comes(moment: str, loop: str) -> None:
    shown = ended(
        f"""
        async def work():
            heard = asyncio.Event()
            loop = asyncio.get_running_loop()
            signals.call_on_signals(loop, lambda number: (print(number.name, flush=True), heard.set()))
            loop.call_later(0.05, come)
            await heard.wait()

        with asyncio.Runner(loop_factory=lambda: {loop}) as runner:
            runner.run(work())
        come()
        print("still here")
        """,
        moment,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (ExitCode.INTERRUPTED, "SIGTERM\n", "")


@pytest.mark.long
def test_what_a_process_would_leave_is_removed_and_its_log_is_written(tmp_path: Path) -> None:
    shown = ended(
        """
        from protocol.runtime.scratch import common_folder, scratch_folder
        from slipstream.new_folder import new_folder

        logs.keep(Path("kept.log"))
        signals.end_on_signals(ExitCode.OK)
        here = Path.cwd()
        with scratch_folder(here) as one, common_folder("name", here) as other, new_folder(here / "to") as new:
            for folder in (one, other, new):
                (folder / "file").touch()
            logging.getLogger("any").warning("the last words")
            come()
        """,
        cwd=tmp_path,
    )
    assert shown.returncode == ExitCode.OK
    assert [file.name for file in tmp_path.iterdir()] == ["kept.log"]
    assert "the last words" in (tmp_path / "kept.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "held",
    [
        "lock = threading.Lock()\nsignals.undone(lock.acquire).__enter__()\nlock.acquire()",
        "os.dup2(full(), 1)\nthreading.Timer(0.5, os.kill, (os.getpid(), 15)).start()\nprint('unread', flush=True)",
    ],
)
def test_what_cannot_be_tidied_up_keeps_no_process(held: str) -> None:
    program = (
        "import threading\nsignals._TIDY_S = 0.2\nsignals.end_on_signals(ExitCode.OK)\n"
        "def full():\n    reader, writer = os.pipe()\n    os.set_blocking(writer, False)\n"
        "    try:\n        while True: os.write(writer, b'x' * 4096)\n    except BlockingIOError: pass\n"
        "    os.set_blocking(writer, True)\n    return writer\n"
        f"{held}\ncome()\ntime.sleep(60)"
    )
    assert ended(program).returncode == ExitCode.OK


@pytest.mark.long
def test_a_stack_without_room_is_no_reason_to_stay() -> None:
    shown = ended(
        """
        signals.end_on_signals(ExitCode.OK)

        def deeper():
            try:
                deeper()
            except RecursionError:
                pass
            signal.raise_signal(number)

        deeper()
        print("still here")
        """
    )
    assert (shown.returncode, shown.stdout) == (ExitCode.OK, "")


@pytest.mark.long
def test_a_fork_does_with_a_signal_what_any_process_does() -> None:
    """A pool of processes that is told to end would otherwise wait for workers that set a flag."""
    shown = ended(
        """
        stop = signals.StopFlag()
        undone = signals.undone(lambda: print("not the fork's to undo"))
        with undone:
            if (child := os.fork()) == 0:
                come()
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop())
        """
    )
    assert (shown.returncode, shown.stdout) == (0, "-15 False\n")


class Ended(BaseException):
    """The process ends here."""


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> StopFlag:
    def end(code: ExitCode) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals, "_end", end)
    return StopFlag()


def test_the_second_signal_ends_the_process_and_not_the_first(flag: StopFlag) -> None:
    assert not flag()
    signal.raise_signal(signal.SIGTERM)
    assert flag()
    with pytest.raises(Ended) as end:
        signal.raise_signal(signal.SIGINT)
    assert end.value.args == (ExitCode.INTERRUPTED,)


def test_the_second_signal_waits_until_the_first_one_is_noted_however_slow_the_machine_is(flag: StopFlag) -> None:
    noted = threading.Event()
    flag.is_noted = noted.is_set
    signal.raise_signal(signal.SIGINT)
    threading.Timer(1.0, noted.set).start()
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)
    assert noted.is_set()


def test_it_does_not_wait_for_ever(flag: StopFlag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_NOTED_WITHIN_S", 0.05)
    flag.is_noted = lambda: False
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)
