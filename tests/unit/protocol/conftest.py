"""What tests of whole commands and of logging need."""

import logging
from collections.abc import Iterator

import pytest

from protocol.service import logs


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logging is as it was afterwards, and its context is this test's own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    ours = [logging.getLogger(name) for name in ("protocol", "replay", "producer", "consumer")]
    levels = [one.level for one in ours]
    monkeypatch.setattr(logs, "_context", {})
    root.handlers.clear()  # or `force` would close those of pytest
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for one, before in zip(ours, levels, strict=True):
        one.setLevel(before)
