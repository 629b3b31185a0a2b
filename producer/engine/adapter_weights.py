"""Policies as LoRA adapters beside each other in vLLM (`swap.mode: adapter`).

Guarantee: a request runs on the adapter that it names, to its end. An id names the same weights for as long as the engine
lives.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest

from producer.engine.core import EngineCore
from producer.engine.weights import Generate, InFlightRequest, prepare
from producer.interfaces import Adapter, AdapterRefusedError


@dataclass
class AdapterWeights:
    """`VllmWeights` that hold several versions."""

    core: EngineCore
    holds_versions: bool = True
    loaded_ids: set[int] = field(default_factory=set)
    _request_ids: Iterator[int] = field(default_factory=itertools.count)

    async def start(self) -> None:
        await self.core.call_workers("loading_start")

    async def load(self, adapter: Adapter) -> None:
        assert adapter.id not in self.loaded_ids, "vLLM would go on serving the weights that it knows under this id"
        try:
            await prepare(self.core, "loading", (adapter.name, adapter.id, str(adapter.path)))
        except AdapterRefusedError:
            await self.core.call_workers("remove_lora", adapter.id)  # another worker may have taken it
            raise
        self.loaded_ids.add(adapter.id)

    async def verify(self, adapter: Adapter, token_ids: list[int]) -> list[float]:
        return await self.core.score(token_ids, self.lora_request(adapter), "")

    def activate(self, adapter: Adapter) -> None:
        """A request may name an adapter as soon as it is loaded."""

    async def discard(self, adapter: Adapter) -> None:
        """vLLM would read an adapter again that a request names, or die."""
        await self.core.call_workers("remove_lora", adapter.id)
        self.loaded_ids.remove(adapter.id)

    def lora_request(self, adapter: Adapter) -> LoRARequest:
        return LoRARequest(adapter.name, adapter.id, str(adapter.path))

    async def sample(self, generate: Generate, adapter: Adapter) -> tuple[Any, InFlightRequest]:
        output = await generate(f"group-{next(self._request_ids)}", self.lora_request(adapter), "")
        return output, InFlightRequest(adapter.version)
