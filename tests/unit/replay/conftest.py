"""A journal for every test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.replay.builders import FillableJournal, memory_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, without waiting for a disk: these tests commit thousands of times."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[FillableJournal]:
    result = FillableJournal(tmp_path / "journal.sqlite")
    yield result
    result.close()
