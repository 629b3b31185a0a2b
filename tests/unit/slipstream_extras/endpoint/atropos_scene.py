"""An endpoint for environments of Atropos over real sockets, with a stand-in for vLLM, and leases to fill."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from protocol.config.run import RunConfig
from slipstream_extras.endpoint.atropos.atropos import Atropos
from slipstream_extras.endpoint.generation import ServedEngine
from slipstream_extras.endpoint.openai import Call
from tests.policies import Policies
from tests.served import served
from tests.unit.slipstream_extras.endpoint.test_endpoint import Endpoint

GROUP_SIZE = 2


def run_config(folder: Path, credit: str = "outcome", **serve: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "maze"),
            "model": {"path": "unused"},
            "environment": {"agent": "atropos"},
            "rewards": {"credit": credit},
            "sampling": {"num_generations": GROUP_SIZE, "max_completion_length": 8},
            "pipeline": {"groups_per_step": 2, "max_staleness": 1},
            "serve": {"enabled": True} | serve,
            "trainer": {"max_steps": 50},
        }
    )


class CountingVllm:
    """Answers completions of token ids: the first one with 100, 100, the next one with 101, 101, and so on."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.tokens: Iterator[int] = itertools.count(100)

    async def answer(self, request, call: Call) -> dict[str, Any]:
        self.requests.append(request.fields)
        prompt = request.fields.get("prompt", [1, 2])
        choices = []
        for index in range(request.fields.get("n", 1)):
            sampled = call.of("r", index, prompt)
            sampled.token_ids = [next(self.tokens)] * 2
            sampled.logprobs, sampled.finish_reason = [-0.25, -0.5], "stop"
            sampled.token_versions = [call.adapter.version] * 2
            text = "".join(map(chr, sampled.token_ids))
            choices.append({"text": text, "message": {"role": "assistant", "content": text}})
        return {"choices": choices}


class Scene(Endpoint):
    atropos: Atropos
    vllm: "CountingVllm"


@contextlib.asynccontextmanager
async def scene(folder: Path, keys: tuple[bytes, ...] = (), version: int = 12, **serve: Any) -> AsyncIterator[Scene]:
    config = run_config(folder, **serve)
    vllm, metrics, registry = CountingVllm(), CollectorRegistry(), Policies()
    registry.swap(version)
    atropos = Atropos(config, 64, lambda: registry.current.version if registry.current else -1)
    engine = ServedEngine(vllm, registry, 16)  # type: ignore[arg-type]
    async with served(config, engine, metrics, keys, atropos=atropos) as (listener, _):
        it = Scene(listener.getsockname()[1], vllm, metrics, registry)  # type: ignore[arg-type]
        it.atropos = atropos
        yield it
