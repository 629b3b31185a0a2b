"""What a tokenizer, a chat template or a large group takes is not taken of the event loop, over which vLLM's output comes."""

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from producer.engine_contract import Completion
from producer.groups import Episode, Rollouts
from producer.metrics import Counters, ProducerMetrics
from producer.rollouts import group as finish
from producer.rollouts.chat import ChatFormat
from producer.rollouts.engine_access import Progress
from producer.rollouts.group import GroupBuilder
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.several_turns import PlayedRollouts
from producer.rollouts.single_turn import PlainRollouts
from protocol.config.rewards import EnvironmentSection
from tests.scripted_trainer import lease
from tests.unit.producer.loop import asynchronous, until

IDS = [[1, 2]]


class Slow:
    """A tokenizer that works until `go`, which only the event loop sets."""

    eos_token = "e"

    def __init__(self) -> None:
        self.go, self.calls = threading.Event(), 0

    def _wait(self, found: Any) -> Any:
        self.calls += 1
        assert self.go.wait(5), "the event loop waits for the tokenizer"
        return found

    def __call__(self, text: Any = None, **_: object) -> Any:
        return self._wait({"input_ids": [1, 2]})

    def decode(self, *_: object, **__: object) -> str:
        return str(self._wait("text"))

    def batch_decode(self, completions: list[Any], **_: object) -> list[str]:
        return list(self._wait(["text"] * len(completions)))

    def apply_chat_template(self, *_: object, **__: object) -> Any:
        return self._wait("rendered")


class Access:
    @asynccontextmanager
    async def enter(self, *_: object) -> Any:
        async def sample(_: list[int], sampling: Any) -> list[Completion]:
            return [Completion([3, 4], [-0.5, -0.5], False, [1, 1]) for _ in range(sampling.num_generations)]

        yield sample


async def with_a_loop_that_goes_on(slow: Slow, work: Any) -> Any:
    task = asyncio.create_task(work)
    await until(lambda: slow.calls)
    slow.go.set()
    return await task


@asynchronous
async def test_prompts_and_completions() -> None:
    slow, work = Slow(), lease(1)
    source = PlainRollouts(Access(), PromptFormat(slow, 64, {}))  # type: ignore[arg-type]
    rollouts = await with_a_loop_that_goes_on(slow, source.generate(work, Progress(work)))
    assert len(rollouts.completions) == work.sampling.num_generations


@asynchronous
async def test_episodes() -> None:
    class Pool:
        rewards_turns = replies = False

        @asynccontextmanager
        async def session(self) -> Any:
            async def reset(*_: object) -> None: ...

            yield SimpleNamespace(reset=reset, done=False)

    slow = Slow()
    work = lease(1, prompt=[{"role": "user", "content": "x"}])
    section = EnvironmentSection(factory="x:X")
    source = PlayedRollouts(Access(), section, Pool(), ChatFormat(slow, 64, {}, [], None), Counters(), ())  # type: ignore[arg-type]
    rollouts = await with_a_loop_that_goes_on(slow, source.generate(work, Progress(work)))
    assert all(episode.messages[0]["content"] == "text" for episode in rollouts.episodes)


@asynchronous
async def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, message, work = Slow(), finish.group_message, lease(1)
    monkeypatch.setattr(finish, "group_message", lambda *given, **how: slow._wait(message(*given, **how)))
    metrics = ProducerMetrics(CollectorRegistry(), ("own",))
    episodes = [Episode.of([1], Completion([2], [-0.5], False, [1])) for _ in range(2)]
    rollouts = Rollouts(episodes, 0.0, ["a", "b"], np.zeros((2, 1), np.float32))
    finishing = GroupBuilder(("own",), ("own",), None, Counters(), metrics)  # type: ignore[arg-type]
    group = await with_a_loop_that_goes_on(slow, finishing.group(work, rollouts, Progress(work)))
    assert group.lease_id == work.lease_id
