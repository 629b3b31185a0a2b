"""A producer's endpoint with a stand-in for vLLM that says what is wanted, and leases for its agents."""

import itertools
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protocol.config.run import RunConfig
from protocol.wire.messages import Lease, Sampling
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.generation import ServedEngine
from slipstream_extras.endpoint.openai import Call, ServedRequest
from slipstream_extras.endpoint.serving import base_url
from tests.policies import Policies
from tests.scripted_trainer import lease
from tests.served import served

Say = Callable[[list[dict[str, Any]]], str]
"""What the policy answers to messages."""


class ScriptedPolicy:
    """In place of vLLM: a token per character, of prompts too, so that a conversation goes on token by token."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._numbers = itertools.count()
        self.requests: list[ServedRequest] = []

    async def answer(self, request: ServedRequest, call: Call) -> dict[str, Any]:
        self.requests.append(request)
        messages = request.fields["messages"]
        said = self._say(messages)
        sampled = call.of(f"r{next(self._numbers)}", 0, _tokens("".join(map(_rendered, messages)) + "a:"))
        sampled.token_ids = _tokens(said + "\n")
        sampled.logprobs = [-0.5] * len(sampled.token_ids)
        sampled.token_versions = [call.adapter.version] * len(sampled.token_ids)
        sampled.finish_reason = "stop"
        usage = {"prompt_tokens": len(sampled.prompt_ids), "completion_tokens": len(sampled.token_ids)}
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return {
            "id": call.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "?",
            "choices": [choice],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }


def _rendered(message: dict[str, Any]) -> str:
    return f"{message['role'][0]}:{message['content']}\n"


def _tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


@asynccontextmanager
async def endpoint(folder: Path, policy: ScriptedPolicy, agents: Agents, **settings: Any) -> AsyncIterator[str]:
    """Its base URL."""
    config = RunConfig.model_validate(
        {
            "run_dir": str(folder),
            "model": {"path": "unused"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"posted": "unused"}]},
            "serve": {"enabled": True} | settings,
        }
    )
    registry = Policies()
    registry.swap(12)
    engine = ServedEngine(policy, registry, 64)  # type: ignore[arg-type]
    async with served(config, engine, agents=agents) as (listener, _):
        yield base_url(listener)


def lease_of(row: dict[str, Any], number: int, num_generations: int = 2, **changes: Any) -> Lease:
    """A row of a dataset as the trainer leases it."""
    columns = {name: value for name, value in row.items() if name != "prompt"}
    sampling = Sampling(num_generations, 1000, 0.7)
    return lease(number, prompt=row["prompt"], columns=columns, sampling=sampling, **changes)


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
