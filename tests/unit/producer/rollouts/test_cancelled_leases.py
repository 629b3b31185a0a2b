"""A lease that is abandoned at any of its waits gives everything back: its place, its pin, its requests, its task."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from producer.engine.weights import MergedWeights
from producer.engine_contract import Adapter, Completion
from producer.rollouts.in_flight import OnSwap
from protocol.wire.messages import Lease, Sampling
from tests.policies import Policies
from tests.scripted_trainer import lease
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.engine.test_merged_weights import Workers, adapter
from tests.unit.producer.loop import asynchronous
from tests.unit.producer.policies.test_registry import blob
from tests.unit.producer.rollouts.generating import Setup


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


class Scene(Setup):
    """Leases that are worked on in a task of the test, one in the engine at a time."""

    def __init__(self, folder: Path, on_swap: OnSwap, registry: Any = None) -> None:
        super().__init__(folder, 1, registry)
        self._begun: list[Coroutine[Any, Any, None]] = []
        self.stepping = Engine()
        self.generation = self.generation_with(on_swap, self.stepping)
        self.before = asyncio.all_tasks()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:  # type: ignore[override]
        self._begun.append(work)

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
        places = self.admission
        assert (self.stepping.running, places._inside, places._behind, self.clock._active) == (0, set(), set(), 0)
        assert (places._line._grants, places._line_behind._grants) == ({}, {})
        assert asyncio.all_tasks() == self.before


WANTED = lease(7, sampling=Sampling(2, 3, 1.0))


@pytest.mark.parametrize("on_swap", ["finish", "continue", "restart"])
@asynchronous
async def test_of_training_whatever_becomes_of_it_at_a_swap(tmp_path: Path, on_swap: OnSwap) -> None:
    policies, versions = Policies(), itertools.count()
    scene = Scene(tmp_path, on_swap, policies)
    scene.stepping.stepped = lambda: policies.swap(next(versions))
    scene.stepping.stepped()

    def check() -> None:
        scene.check()
        assert set(policies.pins.values()) <= {0}

    assert await cancel_at_each_wait(lambda: scene.fulfil(WANTED), check) > 1
    assert await cancel_at_each_wait(lambda: scene.two(WANTED), check) > 0
    assert len(scene.answers) >= 2


@asynchronous
async def test_of_an_evaluation(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "finish")
    unloading = asyncio.create_task(scene.registry.unload_released())
    scene.before.add(unloading)
    await scene.publish(1)
    evaluation = msgspec.structs.replace(WANTED, evaluates=blob(1)[0])

    def check() -> None:
        scene.check()
        assert [version.pins for version in scene.registry._versions.values()] == [0]

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
