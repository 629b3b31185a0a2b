import pytest


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is lost is missed soon, and asked again at once."""
    monkeypatch.setattr("slipstream_extras.engine_server.server._CHECK_EVERY_S", 0.01)
    monkeypatch.setattr("slipstream_extras.engine_server.server._ASK_AGAIN_S", (0.005, 0.02))
