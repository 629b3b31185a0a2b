"""One run for all tests of the viewer, and its index, whole."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from slipstream.run_reader import RunReader
from slipstream_extras.view.index.cache import opened
from tests.unit.slipstream_extras.view.indexing import index_whole
from tests.view_run import write_run


@pytest.fixture(scope="session")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="session")
def written_index(written_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("index") / "index.sqlite"
    index_whole(RunReader(written_run), place)
    return place


@pytest.fixture
def index(written_index: Path) -> Iterator[apsw.Connection]:
    with opened(written_index) as db:
        assert db is not None
        yield db


@pytest.fixture
def run(written_run: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(written_run, tmp_path / "run"))
