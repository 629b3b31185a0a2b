"""Work that vLLM's workers do in a thread, while the engine steps.

Guarantee: `prepare` returns when every worker is done, or says why one refuses.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from producer.interfaces import AdapterRefusedError

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""Calls a method on every worker, which answers once each between two steps."""

_POLL_S = (0.005, 0.05)  # at first, and at most


async def prepare(call: CallWorkers, what: str, argument: Any) -> None:
    """Has the workers do `what`_prepare, and waits until none answers `what`_refusal with None.

    Raises:
        AdapterRefusedError: a worker cannot.
    """
    await call(f"{what}_prepare", argument)
    pause_s, longest_s = _POLL_S
    while None in (refusals := await call(f"{what}_refusal")):
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    for refusal in refusals:
        if refusal:
            raise AdapterRefusedError(refusal)
