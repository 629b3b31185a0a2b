"""Small models, built once. What needs torch imports it itself."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.models import build_model

    return build_model("qwen2", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def one_layer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For many steps where the subject is not the model: half the time of `tiny_model`."""
    from tests.integration.models import build_model

    return build_model("qwen2", tmp_path_factory.mktemp("one-layer") / "model", num_layers=1)
