"""What heavy libraries do while they are imported, and need not do.

Guarantee: afterwards all is as before: what was kept from being imported can be, and garbage is collected.
"""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """While a library is imported that could use `name`, and that nobody needs it for; saves seconds and memory."""
    present = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if present is not None:
            sys.modules[name] = present


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While libraries are imported that make half a million objects. None of them is garbage, and looking for some, again
    whenever there are a quarter more, takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
