"""Which policy's weights the engine has, and which it had when each token was sampled (`swap.mode: merged`).

Guarantee: every token is stamped with the version that sampled it, by the workers' own count at the flip. Weights wait for
verification until they are adopted: meanwhile nothing begins, and what was in flight is not handed out; when they are refused,
the former ones come back, bit for bit, and what was in flight begins anew. KV of other weights is found by nothing that began
after a flip.

    settled --load--> pending verification --adopt----> settled
                         |
                         +------discard---> settled, with the former weights
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from producer.engine.preparation import CallWorkers, prepare
from producer.engine.token_counts import completion_of
from producer.interfaces import Adapter


@dataclass(eq=False)
class InFlightRequest:
    """One group in the engine: what it began on, and each flip since."""

    version: int
    flips: list[tuple[int, dict[int, int]]] = field(default_factory=list)  # to a version; tokens that completions had
    invalidated: bool = False
    task: "asyncio.Task[Any] | None" = None

    def token_versions(self, index: int, num_tokens: int) -> list[int]:
        """Of completion `index`. One that the workers did not know at a flip had not begun."""
        versions: list[int] = []
        version = self.version
        for next_version, counts in self.flips:
            versions += [version] * (min(counts.get(index, 0), num_tokens) - len(versions))
            version = next_version
        return versions + [version] * (num_tokens - len(versions))


class MergedWeights:
    """Swaps them, and samples while they are swapped.

    Args:
        call: see there.
    """

    def __init__(self, call: CallWorkers) -> None:
        self._call = call
        self._present: Adapter | None = None
        self._former: Adapter | None = None
        self._pending_verification = False
        self._num_flips = 0
        self._num_groups = 0
        self._in_flight: dict[str, InFlightRequest] = {}
        self._settled = asyncio.Event()
        self._settled.set()

    async def load(self, adapter: Adapter) -> None:
        """Makes the engine's weights those of this policy, pending verification.

        Raises:
            AdapterRefusedError: they cannot be merged; nothing has changed.
        """
        await prepare(self._call, "merging", str(adapter.path))
        self._settled.clear()
        self._pending_verification = True
        await self._flip(adapter)

    def adopt(self, adapter: Adapter) -> None:
        """Ends the trial well."""
        assert adapter is self._present
        self._end_trial()

    async def discard(self, adapter: Adapter) -> None:
        """Ends the trial badly, if this policy is pending verification."""
        if not self._pending_verification or adapter is not self._present:
            return
        await prepare(self._call, "merging", None)
        await self._flip(self._former)
        for request in self._in_flight.values():
            request.invalidated = True
            if request.task is not None:
                request.task.cancel()
        self._end_trial()

    async def sample(self, generate: Callable[[str, str], Awaitable[Any]]) -> tuple[Any, InFlightRequest]:
        """What `generate` returns at last for a group, none of it from refused weights.

        Args:
            generate: is given a request id, and a salt for the KV.
        """
        while True:
            await self._settled.wait()
            assert self._present is not None
            group = f"group-{self._num_groups}"
            self._num_groups += 1
            request = self._in_flight[group] = InFlightRequest(self._present.version)
            request.task = asyncio.ensure_future(generate(group, self.salt))
            try:
                output = await request.task
                await self._settled.wait()
                if not request.invalidated:
                    return output, request
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not request.invalidated or (task is not None and task.cancelling()):
                    raise
            finally:
                request.task.cancel()
                del self._in_flight[group]

    @property
    def salt(self) -> str:
        """Of KV that the present weights computed."""
        return f"weights-{self._num_flips}"

    async def _flip(self, adapter: Adapter | None) -> None:
        counts = (await self._call("merging_flip"))[0]
        self._former, self._present = self._present, adapter
        self._num_flips += 1
        by_group: dict[str, dict[int, int]] = {}
        for request, count in counts.items():
            if completion := completion_of(request):
                by_group.setdefault(completion[0], {})[completion[1]] = count
        if adapter is None:
            return  # back before the first policy, when nothing can be in flight
        for group, request in self._in_flight.items():
            request.flips.append((adapter.version, by_group.get(group, {})))

    def _end_trial(self) -> None:
        self._pending_verification = False
        self._settled.set()
