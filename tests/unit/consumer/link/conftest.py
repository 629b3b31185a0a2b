"""A trainer process on the journal of the test, and goodbyes that nobody waits for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consumer.link import sessions
from replay.journal.retention import DiskGuard
from tests.unit.consumer.link.builders import Start, Trainer
from tests.unit.replay.builders import FillableJournal, memory_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, without waiting for a disk."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def start(journal: FillableJournal, disk: DiskGuard) -> Start:
    """A trainer process; the journal outlives it."""

    def trainer(*arguments: Any, **options: Any) -> Trainer:
        return Trainer(journal, disk, *arguments, **options)

    return trainer


@pytest.fixture
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose producers do not answer a goodbye."""
    monkeypatch.setattr(sessions, "FAREWELL_S", 0.1)
