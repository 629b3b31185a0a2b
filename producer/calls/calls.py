"""One request of a client in the engine, and what was sampled for it.

Guarantee: every sampled token is kept with its log-prob and the policy version that sampled it. After `close` nothing of the call
is in the engine.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from producer.calls.requests import ServedRequest
from producer.interfaces import Adapter

Answer = dict[str, Any] | AsyncGenerator[str, None]
"""In OpenAI's form: a whole one, or server-sent events."""


@dataclass
class Sampled:
    """One completion. The three lists have equal lengths; `finish_reason` is None unless the completion has ended
    by itself."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Call:
    """The caller pins `adapter`."""

    adapter: Adapter
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _generators: dict[str, Any] = field(default_factory=dict)  # typeshed's AsyncGenerator lacks `ag_running`
    _readers: dict[str, asyncio.Task[Any] | None] = field(default_factory=dict)
    _sampled: dict[tuple[str, int], Sampled] = field(default_factory=dict)

    def add(self, request_id: str, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Adds the generator that samples for one of the call's prompts. It calls `note_reader` whenever it goes on."""
        self._generators[request_id] = generator
        return generator

    def note_reader(self, request_id: str) -> None:
        """Notes that the current task reads this generator; vLLM reads each of several prompts in tasks of its own."""
        self._readers[request_id] = asyncio.current_task()

    def of(self, request_id: str, index: int, prompt_ids: list[int]) -> Sampled:
        return self._sampled.setdefault((request_id, index), Sampled(prompt_ids))

    @property
    def sampled(self) -> list[Sampled]:
        return [self._sampled[key] for key in sorted(self._sampled)]

    @property
    def version(self) -> int:
        """The oldest version that sampled a token."""
        return min((min(each.token_versions, default=self.adapter.version) for each in self.sampled), default=-1)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.sampled)

    @property
    def num_prompt_tokens(self) -> int:
        """Counts every prompt once."""
        return sum({request_id: len(each.prompt_ids) for (request_id, _), each in self._sampled.items()}.values())

    async def close(self) -> None:
        """Ends all generators. It tells each of them to end before it waits for the first."""
        running = [name for name, generator in self._generators.items() if generator.ag_running]
        readers = [reader for name in running if (reader := self._readers.get(name)) is not None]
        for reader in readers:  # nobody else can close what it reads
            reader.cancel()
        for generator in self._generators.values():
            if not generator.ag_running:
                await generator.aclose()
        await asyncio.gather(*readers, return_exceptions=True)


class Answering(Protocol):
    """What the endpoint needs of `producer.engine.openai_server`."""

    async def answer(self, request: ServedRequest, call: Call) -> Answer:
        """Raises RefusedError if vLLM refuses the request."""
        ...
