"""Small models, built once, and what tests of whole commands and of logging need. What needs torch imports it itself."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import library_errors
from protocol.runtime import logs


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.models import build_model

    return build_model("qwen2", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def one_layer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For many steps where the subject is not the model: half the time of `tiny_model`."""
    from tests.integration.models import build_model

    return build_model("qwen2", tmp_path_factory.mktemp("one-layer") / "model", num_layers=1)


@pytest.fixture(autouse=True)
def _no_handler_is_left() -> Iterator[None]:
    """A handler that stays on the root logger would write what later tests log into a file that is closed."""
    before = list(logging.getLogger().handlers)
    yield
    assert logging.getLogger().handlers == before


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the actions of Ctrl-C and SIGTERM after a test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logging is as it was afterwards, and its context is this test's own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    ours = [logging.getLogger(name) for name in ("protocol", "replay", "producer", "consumer", "slipstream_extras")]
    levels = [one.level for one in ours]
    monkeypatch.setattr(logs, "_context", {})
    root.handlers.clear()  # or `force` would close those of pytest
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for one, before in zip(ours, levels, strict=True):
        one.setLevel(before)


@pytest.fixture
def stubs_are_slipstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count an exception that a stub of a test raises as one of Slipstream, and not of a library."""
    monkeypatch.setattr(library_errors, "_OURS", (*library_errors._OURS, "tests"))
