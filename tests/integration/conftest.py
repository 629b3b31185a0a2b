"""Fixtures of the tests that run the real daemons."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.tools import require

from .models import build_model
from .pair import Daemon
from .runs import Run
from .warm_commands import WarmCommands

_LONG = (
    "test_cluster.py", "test_notebook.py", "test_systemd.py", "test_soak.py", "test_slurm.py", "test_readme.py",
    "test_calculator_example.py", "test_engine_server.py", "test_chaos.py", "test_view.py", "test_tutorial.py", "test_engine.py",
    "test_ranks.py", "test_pair.py",
)  # fmt: skip
"""The long files in their order: files that mostly wait stand among files that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first, or one process is left with them at the end."""
    first = dict(zip(_LONG, range(-len(_LONG), 0), strict=True))
    items.sort(key=lambda item: first.get(item.path.name, 0))


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """For what runs code that nobody trusts."""
    require("bwrap", "bubblewrap")


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model of the runs that `start` makes."""
    return build_model("qwen2", tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture
def daemons() -> Iterator[list[Daemon]]:
    """Whatever a test starts and puts here ends with it."""
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.close()


@pytest.fixture
def warm(short_dir: Path) -> Iterator[WarmCommands]:
    commands = WarmCommands(short_dir / "warm")
    yield commands
    commands.close()


@pytest.fixture
def start(tmp_path: Path, short_dir: Path, trained_model: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run from sections of its configuration; everything it started ends with the test."""
    with ExitStack() as stack:

        def make(**sections: Any) -> Run:
            sections["transport"] = {"endpoint": f"ipc://{short_dir}/control.ipc"} | sections.get("transport", {})
            return Run(tmp_path, trained_model, stack, **sections)

        yield make
