"""The fixture of the tests of a running link."""

from collections.abc import Iterator

import pytest

from tests.unit.producer.link.linked import TRANSPORT, Setup


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    """Parametrized indirectly with changes of the transport section."""
    made = Setup(TRANSPORT.model_copy(update=getattr(request, "param", {})))
    yield made
    if made.link.ident is not None:
        made.end()
