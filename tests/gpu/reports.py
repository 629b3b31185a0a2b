"""A test that runs in another process, and pytest's reports of it on their way back.

Guarantee: the test runs as it would here, with its fixtures, its parameters and pytest's configuration.
"""

import gc
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from campaigns.chaos.fleet import Zygote
from protocol.command_line import leave

_WITHOUT = ("cacheprovider", "xdist", "typeguard")
_OPTIONS = (*(f"-pno:{plugin}" for plugin in _WITHOUT), "-W", "ignore::pytest.PytestAssertRewriteWarning", "-q")
_INSIDE = "TEST_RUNS_INSIDE"
_POLL_S = 0.02


class _Recorder:
    """Writes every report of a run of pytest to a file, one a line."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._file.open("a") as file:
            file.write(json.dumps(data, default=str) + "\n")


def are_made_here() -> bool:
    """Whether this is the process that runs the test."""
    return os.environ.get(_INSIDE) == str(os.getpid())


def run(request: dict[str, Any]) -> NoReturn:
    """In a fork of the zygote: runs the test, and ends the process with pytest's exit code."""
    os.environ[_INSIDE] = str(os.getpid())
    gc.unfreeze = lambda: None  # at its end pytest would look through all that the zygote has imported
    leave(int(pytest.main(request["pytest"], plugins=[_Recorder(Path(request["reports"]))])))


def of_test(item: pytest.Item, zygote: Zygote, timeout_s: float) -> Sequence[Any]:
    """Has a fork of the zygote run the test.

    Raises:
        AssertionError: the process died, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="sl-gpu-", dir="/tmp") as folder:
        log, file = Path(folder) / "log", Path(folder) / "reports"
        command = [item.nodeid, *_OPTIONS, f"--basetemp={folder}/tmp", f"--rootdir={item.config.rootpath}"]
        child = zygote.start(command, log=log, pytest=command, reports=str(file))
        until = time.monotonic() + timeout_s
        while (code := child.poll()) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        if code is None:
            child.send(signal.SIGKILL)
        lines = file.read_text().splitlines() if file.exists() else []
        found = [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=json.loads(line))
            for line in lines
        ]
        if not found or found[-1].when != "teardown":
            end = f"did not end within {timeout_s:g} s" if code is None else f"ended with {code}"
            raise AssertionError(f"the process of the test {end}:\n{log.read_text(errors='replace')[-6000:]}")
    return found
