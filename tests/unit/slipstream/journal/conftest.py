"""A run's journal with groups in every state, and the command that looks into it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from replay.journal.writer import Journal
from tests.unit.replay.journal.test_journal_reader import write_run
from tests.unit.slipstream.journal.command import Command


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "run" / "journal.sqlite")) as result:
        write_run(result)
        yield result


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "run", capsys)
