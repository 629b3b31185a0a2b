"""The fixture of the tests of a running link."""

from collections.abc import Iterator

import pytest

from tests.unit.producer.link.linked import TRANSPORT, Setup


@pytest.fixture
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """Parametrized indirectly with changes of the transport section."""
    monkeypatch.setattr("producer.link.session._TICK_S", 0.02)
    monkeypatch.setattr("producer.link.session._RECONNECT_AFTER_S", 0.02)
    made = Setup(TRANSPORT.model_copy(update=getattr(request, "param", {})))
    yield made
    if made.link.ident is not None:
        made.end()
