"""What `up` shows of a run, and how it ends, against a manager in memory."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from protocol.errors import ConfigError, ExitCode, NoAnswerError, NoResourcesError, SlipstreamError
from slipstream_extras.ray.plan import DaemonReport, FleetReport
from slipstream_extras.ray.up import Watch
from tests.unit.slipstream_extras.ray.builders import PLAN, report


class FakeManager:
    """Answers with one report after the other, of which the last stays; an error in place of one is raised."""

    def __init__(self, *answers: Sequence[DaemonReport] | Exception, missing: str = "") -> None:
        self._answers = list(answers)
        self._missing = missing

    def events(self, after: int) -> tuple[int, list[str]]:
        return after + 1, [f"event {after}\x1b[2J"]

    def report(self) -> FleetReport:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return FleetReport(plan=PLAN, wanted=1, daemons=list(answer), missing=self._missing)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watch]:
    """Of a fake manager, on a clock that each look puts forward by ten seconds."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 10

    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def made(*answers: Any, found: bool = True, **options: Any) -> Watch:
        monkeypatch.setattr("slipstream_extras.ray.manager.ManagerHandle.find", lambda: object() if found else None)
        return Watch(FakeManager(*answers, **options), sleep)  # type: ignore[arg-type]

    return made


NEW = [report("trainer", "new"), report("producer-1", "new")]
RUN = [report("trainer"), report("producer-1", "pausing")]


def test_until_everything_was_started(watch: Callable[..., Watch], capsys: pytest.CaptureFixture[str]) -> None:
    watch(NEW, [RUN[0]], RUN).wait_until_it_runs()
    assert capsys.readouterr().out.splitlines() == [f"event {number}\\x1b[2J" for number in range(3)]


def test_what_has_no_room_is_said_within_a_minute(watch: Callable[..., Watch]) -> None:
    with pytest.raises(
        NoResourcesError, match=r"not everything runs after 60 s: producer-1: needs 1 GPU\. What runs goes on"
    ):
        watch(NEW, missing="producer-1: needs 1 GPU").wait_until_it_runs()


def test_a_trainer_that_cannot_start_is_no_lack_of_room(watch: Callable[..., Watch]) -> None:
    watching = watch([report("trainer", "ended", exit_code=78), NEW[1]])
    watching.wait_until_it_runs()
    assert watching.wait_until_it_ends() == ExitCode.CONFIG


def test_a_manager_that_cannot_start_says_why(watch: Callable[..., Watch]) -> None:
    error = GetTimeoutError("ray::ManagerActor()\n  ...\nprotocol.errors.ConfigError: /keys: cannot be written")
    with pytest.raises(ConfigError, match=r"the manager of the run cannot start: .*cannot be written"):
        watch(error, found=False).wait_until_it_runs()


@pytest.mark.parametrize("code", [0, 65, 72])
def test_the_end_is_the_trainers(watch: Callable[..., Watch], code: int) -> None:
    assert watch(RUN, [report("trainer", "ended", exit_code=code)]).wait_until_it_ends() == code


def test_an_end_that_no_trainer_has(watch: Callable[..., Watch]) -> None:
    with pytest.raises(SlipstreamError, match="the trainer ended with 99: why"):
        watch([report("trainer", "ended", exit_code=99, message="why")]).wait_until_it_ends()


def test_a_silent_manager_ends_the_watch_after_a_minute(watch: Callable[..., Watch]) -> None:
    with pytest.raises(NoAnswerError, match=r"has not answered for 60 s .*Give the same slipstream cluster up again"):
        watch(RUN, GetTimeoutError("")).wait_until_it_ends()
    assert watch(GetTimeoutError(""), RUN, [report("trainer", "ended", exit_code=0)]).wait_until_it_ends() == 0


def test_a_run_that_somebody_took_down(watch: Callable[..., Watch], capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(GetTimeoutError(""), found=False).wait_until_it_ends() == ExitCode.OK
    assert "the run was taken down" in capsys.readouterr().out


@pytest.mark.long
def test_ray_is_imported_after_its_environment_is_set() -> None:
    """Ray reads the variables of `session.connected` when it is imported; without them it hangs at a loopback address."""
    modules = (
        "slipstream_extras.ray.up, slipstream_extras.ray.down, slipstream_extras.ray.cli, slipstream_extras.ray.session"
    )
    program = f"import sys, {modules}; print('ray' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert shown.stdout == "False\n", shown.stderr
