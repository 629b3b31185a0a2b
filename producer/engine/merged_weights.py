"""The policy that is merged into the engine's weights, and which one it was when a token was sampled (`swap.mode: merged`).

Guarantee: every token is stamped with the version that sampled it, by the workers' own count at the flip. Weights wait for
verification until they are activated: meanwhile nothing begins, and what was in flight is not handed out; when they are
discarded instead, the former ones come back, bit for bit, and what was in flight begins anew. No request finds KV that other
weights computed before it began.

    settled --load--> pending verification --activate--> settled
                         |
                         +------discard---> settled, with the former weights
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from producer.engine.token_counts import completion_of
from producer.engine.weights import Core, Generate, InFlightRequest, prepare
from producer.interfaces import Adapter, AdapterRefusedError
from protocol.errors import EngineError


@dataclass
class MergedWeights:
    """`VllmWeights` that hold one version at a time."""

    core: Core
    holds_versions: bool = False
    _present: Adapter | None = None
    _former: Adapter | None = None
    _num_flips: int = 0
    _num_groups: int = 0
    _in_flight: dict[str, InFlightRequest] = field(default_factory=dict)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._settled.set()

    async def start(self) -> None:
        await self.core.call_workers("merging_start")

    async def load(self, adapter: Adapter) -> None:
        """Makes the engine's weights those of this policy. They wait for verification."""
        await prepare(self.core, "merging", str(adapter.path))
        self._settled.clear()
        await self._flip(adapter)

    async def verify(self, adapter: Adapter, token_ids: list[int]) -> list[float]:
        return await self.core.score(token_ids, None, self.salt)

    def activate(self, adapter: Adapter) -> None:
        assert adapter is self._present
        self._settled.set()

    async def discard(self, adapter: Adapter) -> None:
        """Takes this policy back if it waits for verification; otherwise its weights are gone already. Raises EngineError where
        the former weights cannot come back."""
        if self._settled.is_set() or adapter is not self._present:
            return
        try:
            await prepare(self.core, "merging", None)
        except AdapterRefusedError as error:
            raise EngineError(
                f"the engine has weights that were refused, and cannot take back the former ones: {error}; start the producer "
                "again, with more memory if that is the reason"
            ) from error
        await self._flip(self._former)
        for request in self._in_flight.values():
            request.invalidated = True
            if request.task is not None:
                request.task.cancel()
        self._settled.set()

    def lora_request(self, adapter: Adapter) -> None:
        return None

    async def sample(self, generate: Generate, adapter: Adapter) -> tuple[Any, InFlightRequest]:
        """Under the present weights, and those that take their place meanwhile; never under weights that are discarded."""
        while True:
            await self._settled.wait()
            assert self._present is not None
            group = f"group-{self._num_groups}"
            self._num_groups += 1
            request = self._in_flight[group] = InFlightRequest(self._present.version)
            request.task = asyncio.ensure_future(generate(group, None, self.salt))
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
        counts = (await self.core.call_workers("merging_flip"))[0]
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
