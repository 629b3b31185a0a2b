"""Shared by all tests: hypothesis settings, short socket paths, and no garbage collection of imports.

Tests that start real engines, trainers or daemons are marked `integration`.
"""

import atexit
import gc
import importlib.metadata
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # that of trio, which imports trio
from hypothesis import HealthCheck, settings

from tests.plugins import use_entry_points_of_checkout

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

use_entry_points_of_checkout()
settings.register_profile(
    "house",
    max_examples=50,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", parent=settings.get_profile("house"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))

_END_OF_A_LOG = 1500
"""Characters of it that a failure shows."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, because imports leave none, and look up once which package is where."""
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHDYNAMO_DISABLE", "1")  # or bitsandbytes imports torch's compiler, a second each time
            patch.setattr(
                importlib.metadata, "packages_distributions", cache(importlib.metadata.packages_distributions)
            )
            return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a module that knows torch, which may depend on how a CPU rounds. Long tests come first, so that none is
    left for the end."""
    for item in items:
        if hasattr(getattr(item, "module", None), "torch"):
            item.add_marker("numeric")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Look for no garbage in what was imported, which takes half a second each time, and seldom in the rest. Loggers of libraries
    hand on what they get, or pytest adds its handlers to each of some hundred, and removes them, three times a test."""
    gc.freeze()
    gc.set_threshold(10_000)
    for one in logging.root.manager.loggerDict.values():
        if isinstance(one, logging.Logger):
            one.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure the ends of the logs in the folders that its test got."""
    report = yield
    if report.failed and call.when == "call":
        given = getattr(item, "funcargs", {}).values()
        with suppress(OSError):  # daemons that still run come and go with their folders
            for log in sorted({log for each in given if isinstance(each, Path) for log in each.rglob("*.log")}):
                report.sections.append((str(log), log.read_text(errors="replace")[-_END_OF_A_LOG:]))
    return report


def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist has told all that it knows when it ends, and its interpreter would visit millions of objects."""
    if hasattr(config, "workerinput"):
        worker = os.getpid()
        atexit.register(
            lambda: os._exit(0) if os.getpid() == worker else None
        )  # not its forks, whose codes are looked at


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        gc.unfreeze()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a socket name (ipc paths end at 107 bytes; pytest's own can be longer)."""
    folder = tempfile.mkdtemp(prefix="sl-", dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here ends with the test."""
    with ExitStack() as opened:
        yield opened
