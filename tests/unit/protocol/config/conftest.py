"""Where the tests of the configuration write their file."""

from pathlib import Path

import pytest


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")
