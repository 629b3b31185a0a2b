"""A journal, a disk and a clock that do what the test says. What needs torch imports it itself."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from consumer import waiting as waiting_module
from replay.journal.retention import DiskGuard
from tests.unit.consumer.builders import Clock
from tests.unit.replay.builders import FillableJournal


@pytest.fixture(scope="module")
def float64(tiny_model: Path, one_layer_model: Path) -> Iterator[None]:
    """For modules that compare formulas. The models come first: their weights are drawn in float32, whoever needs them."""
    from tests.unit.consumer.float64 import in_float64

    with in_float64():
        yield


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[FillableJournal]:
    result = FillableJournal(tmp_path / "journal.sqlite")
    yield result
    result.close()


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the disk says of itself: 1000 bytes, half of them used."""
    result = SimpleNamespace(total=1000, used=500, free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: result)
    return result


@pytest.fixture
def disk(tmp_path: Path, usage: SimpleNamespace) -> DiskGuard:
    """It has room until more than 90 % of `usage` are used."""
    return DiskGuard(tmp_path, 0.9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the main thread's waits."""
    result = Clock()
    monkeypatch.setattr(waiting_module, "time", result)
    return result
