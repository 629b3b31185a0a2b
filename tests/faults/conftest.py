"""The model that every trainer under test starts from."""

from pathlib import Path

import pytest

from tests.integration.models import build_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("faults") / "model")
