"""Generation on plain rollouts, around an engine that holds requests."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from producer.engine_contract import Adapter, Completion
from producer.groups import LeaseFailure
from producer.metrics import Counters, ProducerMetrics
from producer.policies.loader import DownloadedPolicy
from producer.rewards.pool import RewardFailures, Scored
from producer.rollouts.admission import Admission
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.group import GroupBuilder
from producer.rollouts.in_flight import InFlight
from producer.rollouts.leases import Generation
from producer.rollouts.single_turn import PlainRollouts
from protocol.wire.messages import Group, Nack, Sampling
from tests.policies import registry_of
from tests.unit.producer.loop import settle
from tests.unit.producer.policies.test_registry import FakeEngine, blob


class SlowEngine(FakeEngine):
    """Holds requests until released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()
        self.running = self.most_running = 0
        self.error: Exception | None = None
        self.started_on: list[int] = []

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.started_on.append(adapter.version)
        try:
            await self.release.wait()
            if self.error:
                raise self.error
            assert adapter.id in self.loaded
            return [
                Completion([i, 2][:n], [-0.5, -1.5][:n], n == 2, [adapter.version] * n)
                for i, n in zip(range(sampling.num_generations), itertools.cycle((1, 2)))
            ]
        finally:
            self.running -= 1


class Prompts:
    async def in_thread(self, work, *args):
        return work(*args)

    def encode(self, prompt, max_completion_length):
        if prompt == "bad":
            raise LeaseFailure("bad_prompt", "it is bad")
        return [7, 8, 9]

    def decode(self, prompt, completions):
        return [str(ids) for ids in completions]


class Rewards:
    """Holds groups while `release` is an event that is not set."""

    release: asyncio.Event | None = None

    async def score(self, prompt, completions, completion_ids, columns, *, number, version):
        if self.release is not None:
            await self.release.wait()
        if prompt == "unscorable":
            raise LeaseFailure("reward_failed", "it raised")
        rewards = np.array([[float(len(ids)), np.nan] for ids in completion_ids], dtype=np.float32)
        return Scored(rewards, 0.25, RewardFailures())


class Setup:
    def __init__(self, folder: Path, max_groups: int, registry: Any = None) -> None:
        self.engine = SlowEngine()
        self.counters = Counters()
        self.answers: list[Group | Nack] = []
        self.metrics = ProducerMetrics(CollectorRegistry())
        self.registry = registry or registry_of(self.engine, folder, self.counters, metrics=self.metrics)
        self.tasks: list[asyncio.Task[None]] = []
        self.rewards = Rewards()
        self.admission = Admission(max_groups, 4, lambda: None)
        self.finish = GroupBuilder(
            ("length", "none"), (), self.rewards, self.counters, self.metrics, Prompts().in_thread
        )
        self.generation = self.generation_with("finish", self.engine)

    def generation_with(self, on_swap, engine) -> Generation:
        in_flight = InFlight(engine, self.registry, self.counters, on_swap)
        self.access, self.clock = EngineAccess(self.registry, self.admission, in_flight), in_flight.busy
        return self.generation_from(PlainRollouts(self.access, Prompts()))

    def generation_from(self, source) -> Generation:
        return Generation(source, self.finish, self.clock, self.counters, self.spawn, self.answers.append)

    def spawn(self, work):
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def publish(self, version: int) -> None:
        await self.registry.publish(DownloadedPolicy(*blob(version), announced_at=0.0))

    async def settle(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 5)
        await settle()
