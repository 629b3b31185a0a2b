"""A small model and trainers on it, built once."""

from pathlib import Path

import pytest

from tests.integration.models import build_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("tiny") / "model")
