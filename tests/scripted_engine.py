"""Engines without vLLM, for tests that run the real `rl-producer`.

Guarantee: everything around the engine is the product's own. `ScriptedEngine` samples random tokens that the small models of
`tests.integration.models` know, in random times, some of them long. Clients and agents of the endpoint get answers too,
whole or as a stream.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from producer.engine_contract import Adapter, AdapterRefusedError, Completion, EngineCapabilities, Rows, Scored
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from slipstream_extras.endpoint.openai import Answer, Call, Sampled, ServedRequest
from tests.scripted import facts

_LOWEST_TOKEN, _HIGHEST_TOKEN = 3, 40
_PIECES = 4  # of a streamed answer


class Pace(NamedTuple):
    """How long a group takes: up to `fast_s`, and `share_slow` of them up to `slow_s`."""

    fast_s: float = 0.03
    slow_s: float = 0.9
    share_slow: float = 0.4  # so many and so slow that the trainer waits, and groups stand in

    def draw(self, chance: random.Random) -> float:
        return chance.uniform(0, self.slow_s if chance.random() < self.share_slow else self.fast_s)


DEFAULT_PACE = Pace()


def install(
    pace: Pace = DEFAULT_PACE, seed: int | None = None, reach: Callable[[str], None] = lambda point: None
) -> None:
    """Puts a `ScriptedEngine` in place.

    Args:
        seed: of what is sampled. None: no two processes sample the same.
        reach: called at the points `generate.begin`, `.half` and `.done`.
    """
    chance = random.Random(os.urandom(16) if seed is None else seed)

    put_in_place(lambda config, num_gpus: ScriptedEngine(config, pace, chance, reach))


def put_in_place(factory: Callable[[Any, int], Any]) -> None:
    """Whoever imports `producer.engine.engine` in this process gets this engine."""
    module = ModuleType("producer.engine.engine")
    module.VllmEngine = factory  # type: ignore[attr-defined]
    sys.modules["producer.engine.engine"] = module


class NoWeights:
    """Takes every policy, and cannot be asked what it computes."""

    survival: dict[str, float] = {}

    async def load(self, adapter: Adapter) -> None: ...

    async def verify(self, adapter: Adapter | None, rows: Rows) -> list[Scored]:
        raise AdapterRefusedError("there are no weights here")

    def activate(self, adapter: Adapter) -> None: ...

    async def discard(self, adapter: Adapter) -> None: ...


class EngineWithoutWeights:
    """All of `producer.engine_contract.Engine` but what it samples."""

    max_num_seqs = 8

    def __init__(self, config: Any, **known: Any) -> None:
        folder = Path(config.model.path)
        self.capabilities = EngineCapabilities(facts(**known), folder, self.max_num_seqs, can_sleep=True)
        self.weights = NoWeights()

    async def warm_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def current_load(self) -> None:
        return None

    def watch_load(self, look: Callable[[], None]) -> None: ...

    def outage(self) -> None:
        return None

    def check_alive(self) -> None: ...

    def note_end(self) -> None: ...

    def shutdown(self) -> None: ...


def digests(config: Any) -> dict[str, str]:
    folder = Path(config.model.path)
    return {"base_model_digest": base_model_digest(folder), "tokenizer_digest": tokenizer_digest(folder)}


class ScriptedEngine(EngineWithoutWeights):
    def __init__(self, config: Any, pace: Pace, chance: random.Random, reach: Callable[[str], None]) -> None:
        super().__init__(config, **digests(config), reward_names=list(config.reward_names), dtype=config.model.dtype)
        self._pace = pace
        self._random = chance
        self._reach = reach

    async def generate(self, prompt_ids: Any, sampling: Any, adapter: Any, cut: Any) -> list[Completion]:
        self._reach("generate.begin")
        await asyncio.sleep(self._pace.draw(self._random))
        self._reach("generate.half")
        await asyncio.sleep(0)
        longest = sampling.max_completion_length
        lengths = [self._random.randint(1, longest) for _ in range(sampling.num_generations)]
        self._reach("generate.done")
        versions = [adapter.version] * longest
        return [Completion(*sample(self._random, length), length == longest, versions[:length]) for length in lengths]

    def openai_server(self, config: Any) -> "OpenAIServer":
        return OpenAIServer(self._pace, self._random, config.sampling.max_completion_length)


class OpenAIServer:
    """In the place of vLLM's serving classes (`slipstream_extras.endpoint.openai_server`)."""

    def __init__(self, pace: Pace, chance: random.Random, longest: int) -> None:
        self._pace = pace
        self._random = chance
        self._longest = longest

    async def answer(self, request: ServedRequest, call: Call) -> Answer:
        await asyncio.sleep(self._pace.draw(self._random))
        sampled = call.of(call.id, 0, _tokens_of(request))
        if request.fields.get("stream"):
            return call.add(call.id, self._events(sampled, call))
        self._sample_more(sampled, call, self._random.randint(1, self._longest))
        sampled.finish_reason = "stop"
        usage = {"prompt_tokens": len(sampled.prompt_ids), "completion_tokens": len(sampled.token_ids)}
        choice = {"index": 0, "text": "?", "message": {"role": "assistant", "content": "?"}, "finish_reason": "stop"}
        return {"id": call.id, "created": int(time.time()), "choices": [choice], "usage": usage}

    async def _events(self, sampled: Sampled, call: Call) -> AsyncGenerator[str, None]:
        for number in range(_PIECES):
            await asyncio.sleep(self._pace.draw(self._random) / _PIECES)
            self._sample_more(sampled, call, 1)
            sampled.finish_reason = "stop" if number + 1 == _PIECES else None
            choice = {"index": 0, "delta": {"content": "?"}, "finish_reason": sampled.finish_reason}
            yield f"data: {json.dumps({'id': call.id, 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    def _sample_more(self, sampled: Sampled, call: Call, length: int) -> None:
        token_ids, logprobs = sample(self._random, length)
        sampled.token_ids += token_ids
        sampled.logprobs += logprobs
        sampled.token_versions += [call.adapter.version] * length


def _tokens_of(request: ServedRequest) -> list[int]:
    """One for each character."""
    messages = request.fields.get("messages")
    text = request.fields["prompt"] if messages is None else "".join(message["content"] for message in messages)
    return [_LOWEST_TOKEN + ord(character) % (_HIGHEST_TOKEN - _LOWEST_TOKEN) for character in text]


def sample(chance: random.Random, length: int) -> tuple[list[int], list[float]]:
    """So many tokens and their log-probs."""
    return (
        [chance.randrange(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(length)],
        [-chance.uniform(0.1, 4.0) for _ in range(length)],
    )
