"""The garbage collector pauses while libraries are imported, and goes on, whatever an import does."""

import gc
from contextlib import suppress

import pytest

from protocol.runtime.processes import gc_disabled


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_collected_again_as_before(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        with suppress(ImportError), gc_disabled():
            assert not gc.isenabled()
            import no_such_library  # type: ignore[import-not-found]  # noqa: F401
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
