"""A lease that is abandoned at any of its waits gives everything back: its place, its pin, its requests, its task."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from producer.engine.merged_weights import MergedWeights
from producer.interfaces import Adapter, Completion
from producer.metrics import ProducerMetrics
from producer.rollouts.admission import Admission
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.finish import Finish
from producer.rollouts.generation import Generation
from producer.rollouts.in_flight import InFlight, OnSwap
from producer.rollouts.plain_rollouts import PlainRollouts
from producer.state import Counters
from protocol.wire.messages import Lease, Sampling
from tests.policies import Policies
from tests.scripted_trainer import lease
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.engine.test_merged_weights import Workers, adapter
from tests.unit.producer.loop import asynchronous
from tests.unit.producer.policies.test_adapters import Setup, blob
from tests.unit.producer.rollouts.generating import Prompts, Rewards


class Engine:
    """Samples a token at each of its waits, of three; `stepped` is called after each."""

    capabilities = SimpleNamespace(holds_versions=True)

    def __init__(self) -> None:
        self.running = 0
        self.stepped: Callable[[], None] = lambda: None

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        self.running += 1
        try:
            for number in range(1, 4):
                await asyncio.sleep(0)
                self.stepped()
                if cut.is_set() or number == sampling.max_completion_length:
                    break
            is_cut = cut.is_set() and number < min(3, sampling.max_completion_length)
            one = Completion([7] * number, [-0.5] * number, False, [adapter.version] * number, is_cut)
            return [one] * sampling.num_generations
        finally:
            self.running -= 1


class Scene:
    """Leases that are worked on in a task of the test."""

    def __init__(self, registry: Any, on_swap: OnSwap) -> None:
        self.engine, self.answers = Engine(), list[Any]()
        self.before = asyncio.all_tasks()
        self.places = Admission(1, 4, lambda: None)
        self._begun: list[Coroutine[Any, Any, None]] = []
        counters = Counters()
        in_flight = InFlight(self.engine, registry, counters, on_swap)  # type: ignore[arg-type]
        access, self.clock = EngineAccess(registry, self.places, in_flight), in_flight.busy
        metrics = ProducerMetrics(CollectorRegistry())
        finish = Finish(("length", "none"), (), Rewards(), counters, metrics)  # type: ignore[arg-type]
        self.generation = Generation(
            PlainRollouts(access, Prompts()),  # type: ignore[arg-type]
            finish,
            self.clock,
            counters,
            self._begun.append,  # type: ignore[arg-type]
            self.answers.append,
        )

    def fulfil(self, lease: Lease) -> Coroutine[Any, Any, None]:
        self.generation.start(lease)
        return self._begun.pop()

    async def two(self, lease: Lease) -> None:
        """One in the engine, and one that waits for its place."""
        other = msgspec.structs.replace(lease, lease_id="other")
        async with asyncio.TaskGroup() as group:
            for one in (lease, other):
                group.create_task(self.fulfil(one))

    def check(self) -> None:
        for work in self.generation._works.values():
            work.task = None
        self.generation.abandon_all()
        places = self.places
        assert (self.engine.running, places._inside, places._background, self.clock._active) == (0, 0, 0, 0)
        assert (places._line._turns, places._line_behind._turns) == ({}, {})
        assert asyncio.all_tasks() == self.before


WANTED = lease(7, sampling=Sampling(2, 3, 1.0))


@pytest.mark.parametrize("on_swap", ["finish", "continue", "restart"])
@asynchronous
async def test_of_training_whatever_becomes_of_it_at_a_swap(on_swap: OnSwap) -> None:
    policies, versions = Policies(), itertools.count()
    scene = Scene(policies, on_swap)
    scene.engine.stepped = lambda: policies.swap(next(versions))
    scene.engine.stepped()

    def check() -> None:
        scene.check()
        assert set(policies.pins.values()) <= {0}

    assert await cancel_at_each_wait(lambda: scene.fulfil(WANTED), check) > 1
    assert await cancel_at_each_wait(lambda: scene.two(WANTED), check) > 0
    assert len(scene.answers) >= 2


@asynchronous
async def test_of_an_evaluation(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    unloading = asyncio.create_task(setup.registry.unload_released())
    scene = Scene(setup.registry, "finish")
    await setup.publish(1)
    evaluation = msgspec.structs.replace(WANTED, evaluates=blob(1)[0])

    def check() -> None:
        scene.check()
        assert [version.pins for version in setup.registry._versions.values()] == [0]

    assert await cancel_at_each_wait(lambda: scene.fulfil(evaluation), check) > 0
    assert await cancel_at_each_wait(lambda: scene.two(evaluation), check) > 0
    unloading.cancel()


@asynchronous
async def test_of_merged_weights_also_while_they_are_pending_verification() -> None:
    running = 0
    weights = MergedWeights(Workers())
    first = adapter(1)
    await weights.load(first)
    weights.activate(first)
    before = asyncio.all_tasks()

    async def generate(group: str, lora: None, salt: str) -> str:
        nonlocal running
        running += 1
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            weights._settled.clear()  # a swap begins,
            asyncio.get_running_loop().call_later(0.001, weights._settled.set)  # and ends
            return group
        finally:
            running -= 1

    def check() -> None:
        weights._settled.set()
        assert (running, weights._in_flight, asyncio.all_tasks()) == (0, {}, before)

    async def sample() -> None:
        await weights.sample(generate, first)

    assert await cancel_at_each_wait(sample, check) == 2
