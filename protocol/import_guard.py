"""Keeps a library from importing another one, which it does wherever it finds it.

Guarantee: afterwards that one can be imported as before.
"""

import contextlib
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
