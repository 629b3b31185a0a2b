"""Keeps TRL from importing vLLM, which it does wherever it finds it, and which a trainer has no use for.

Guarantee: afterwards vLLM can be imported as before.
"""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_vllm() -> Iterator[None]:
    """While TRL is imported; saves seconds and memory."""
    present = sys.modules.get("vllm")
    sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["vllm"]
        if present is not None:
            sys.modules["vllm"] = present
