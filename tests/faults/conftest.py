"""The model that every trainer under test starts from, and runs of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.run_under_test import Run
from tests.integration.models import build_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture
def make_run(tmp_path: Path, short_dir: Path, model: Path) -> Iterator[Callable[..., Run]]:
    """Over ipc unless told otherwise. Its daemons are gone after the test."""
    with ExitStack() as stack:

        def made(transport: dict[str, Any] | None = None, **options: Any) -> Run:
            return Run(stack, tmp_path, model, transport=transport or {"endpoint": f"ipc://{short_dir}/c"}, **options)

        yield made
