"""A small model, built once; a journal, a disk and a clock that do what the test says. What needs torch imports it itself."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from consumer import patience as patience_module
from replay.disk import DiskGuard

from .builders import Clock, FillableJournal


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.models import build_model

    return build_model("qwen2", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def one_layer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For many steps where the subject is not the model: half the time of `tiny_model`."""
    from tests.integration.models import build_model

    return build_model("qwen2", tmp_path_factory.mktemp("one-layer") / "model", num_layers=1)


@pytest.fixture(scope="module")
def float64(tiny_model: Path, one_layer_model: Path) -> Iterator[None]:
    """For modules that compare formulas. The models come first: their weights are drawn in float32, whoever needs them."""
    from .float64 import in_float64

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
    monkeypatch.setattr(patience_module, "time", result)
    return result
