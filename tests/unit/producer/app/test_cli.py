"""`rl-producer` by its flags: a file or an address, and a start with another bundle in the same process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import yaml

from producer.app import cli
from protocol.config.run import RunConfig
from protocol.errors import BundleChangedError, ExitCode
from slipstream_extras.bundle.bundle import digest_of
from tests.unit.slipstream_extras.bundle.bundle_server import bundle_of, served

REPOSITORY = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The command sets variables."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def here(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(short_dir)
    return short_dir


class Replaced(Exception):
    """In place of the process that `execve` makes of this one."""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def execve(*arguments: Any) -> None:
        seen.append((*arguments, Path.cwd()))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    return seen


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rl-producer", *arguments])
    return cli.command()


def daemon(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    module = ModuleType("producer.app.daemon")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "producer.app.daemon", module)


@pytest.mark.parametrize("arguments", [[], ["--config", "a", "--connect", "ipc:///b"]])
def test_it_is_given_a_file_or_an_address(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, *arguments)
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.long
def test_a_check_prints_the_configuration_that_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stack: ExitStack, here: Path
) -> None:
    served(stack, here, bundle_of())
    assert start(monkeypatch, "--connect", f"ipc://{here}/control.ipc", "--check", "--set", "seed=5") == ExitCode.OK
    assert yaml.safe_load(capsys.readouterr().out)["seed"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--connect", "ipc://{}/nobody.ipc", "--wait", "0.2"], ExitCode.NO_ANSWER, "no trainer has answered"),
        (["--connect", "tcp://127.0.0.1:5557"], ExitCode.CONFIG, "over TCP both need keys"),
        (["--connect", "ipc://{}/control.ipc"], ExitCode.BUNDLE, "cannot be read"),
    ],
)
def test_what_keeps_it_from_joining_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stack: ExitStack,
    here: Path,
    arguments: list[str],
    code: ExitCode,
    said: str,
) -> None:
    served(stack, here, b"no bundle")
    assert start(monkeypatch, *(argument.format(here) for argument in arguments)) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rl-producer: error: ")
    assert said in last


def test_another_bundle_is_another_start_of_the_same_command_in_the_same_place(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack, here: Path, replaced: list[Any]
) -> None:
    data = bundle_of()
    served(stack, here, data)
    os.environ["MINE"] = "1"
    started: list[Any] = []

    def run(config: RunConfig, gpus: list[int], bundle: str) -> ExitCode:
        started.append((Path(config.rewards.functions[0].place).name, gpus, bundle))
        os.environ["OF_A_LIBRARY"] = "1"
        raise BundleChangedError("another")

    daemon(monkeypatch, run)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "rl-producer", "..."])
    with pytest.raises(Replaced):
        start(monkeypatch, "--gpu", "cpu", "--connect", f"ipc://{here}/control.ipc")
    assert started == [("rewards.py:exact", [], digest_of(data))]
    [(program, command, environment, folder)] = replaced
    assert (program, command) == (sys.executable, [sys.executable, "-X", "dev", "rl-producer", "..."])
    assert environment["MINE"] == "1"
    assert "OF_A_LIBRARY" not in environment
    assert folder == here


def test_the_end_of_the_run_is_the_end_of_the_command(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack, here: Path, replaced: list[Any]
) -> None:
    served(stack, here, bundle_of())
    daemon(monkeypatch, lambda config, gpus, bundle: ExitCode.OK)
    assert start(monkeypatch, "--gpu", "cpu", "--connect", f"ipc://{here}/control.ipc") == ExitCode.OK
    assert replaced == []


@pytest.mark.long
def test_it_may_be_told_to_stop_while_it_waits_for_the_trainer(here: Path) -> None:
    """As a process, because the signal is the point."""
    command = [sys.executable, "-m", "producer.app.cli", "--connect", f"ipc://{here}/control.ipc"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ) as it:
        assert it.stderr is not None
        assert "waiting for the trainer at ipc://" in it.stderr.readline()
        it.send_signal(signal.SIGTERM)
        assert it.wait(60) == ExitCode.OK
