"""The producer's side of a shared GPU: in which order it leaves and comes back, and what it tells when."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from producer.app.gpu_turns import GpuTurns, until_free
from producer.engine_gate import EngineGate
from producer.metrics import Counters
from protocol.errors import EngineError, StalledError
from protocol.wire.messages import GpuTurn
from tests.unit.producer.loop import asynchronous, settle, until

SILENCE_S = 30.0


class Scene:
    """A producer whose engine, memory and clock are the test's."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.counters, self.gate, self.now, self.free = Counters(), EngineGate(), 0.0, 10
        self.turns = GpuTurns(
            self,
            self.gate,
            self._unchanged,
            self.counters,
            self._tell,
            SILENCE_S,
            60.0,
            lambda: self.free,
            clock=lambda: self.now,  # type: ignore[arg-type]
        )

    @asynccontextmanager
    async def _unchanged(self) -> AsyncIterator[None]:
        yield
        assert not self.gate.is_open
        self.happened.append("is what it was")

    async def sleep(self) -> None:
        assert not self.gate.is_open
        self.happened.append("sleeps")
        self.free += 100

    async def wake(self) -> None:
        assert not self.gate.is_open
        assert self.counters.asleep_in == -1, "the trainer is told before"
        assert self.free >= 100, "the memory is there"
        self.happened.append("wakes")

    def _tell(self) -> None:
        self.happened.append(f"says {self.counters.asleep_in}")

    def note(self, number: int, side: str) -> None:
        self.turns.note(GpuTurn(number, side, 0.0))  # type: ignore[arg-type]


def in_turns(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @asynchronous
    async def run() -> None:
        scene = Scene()
        work = asyncio.create_task(scene.turns.run())
        try:
            await test(scene)
        finally:
            work.cancel()
            await asyncio.wait([work])

    return run


@in_turns
async def test_the_engine_sleeps_before_the_trainer_is_told_and_wakes_after(scene: Scene) -> None:
    scene.turns.note(None)
    scene.note(0, "producers")
    await settle()
    assert scene.happened == []
    scene.note(1, "trainer")
    await until(lambda: scene.happened == ["sleeps", "says 1"])
    scene.note(3, "trainer")  # the turn in between was lost on the way
    await until(lambda: scene.happened[-1] == "says 3")
    scene.note(4, "producers")
    await until(lambda: scene.gate.is_open)
    assert scene.happened == ["sleeps", "says 1", "says 3", "says -1", "wakes", "is what it was"]


@in_turns
async def test_who_is_still_in_the_engine_keeps_it_awake_until_the_turn_is_withdrawn(scene: Scene) -> None:
    async with scene.gate.use():
        scene.turns.note(GpuTurn(1, "trainer", 60.0))
        await until(lambda: not scene.gate.is_open)
        scene.note(2, "producers")
        await until(lambda: scene.gate.is_open)
    assert scene.happened == []


@in_turns
async def test_a_trainer_that_falls_silent_loses_its_turn_when_its_memory_is_free(scene: Scene) -> None:
    scene.note(1, "trainer")
    await until(lambda: scene.happened == ["sleeps", "says 1"])
    scene.free = 30  # the trainer's model came
    scene.now = SILENCE_S
    await until(lambda: scene.happened[-1] == "says -1")
    assert not scene.gate.is_open
    scene.free = 110  # its process is gone
    await until(lambda: scene.gate.is_open)
    assert scene.happened[-2:] == ["wakes", "is what it was"]
    scene.note(1, "trainer")  # it only stood still
    await until(lambda: scene.happened[-2:] == ["sleeps", "says 1"])


@asynchronous
async def test_an_engine_that_does_not_sleep_ends_the_producer() -> None:
    scene = Scene()

    async def fail() -> None:
        raise EngineError("no")

    scene.sleep = fail  # type: ignore[method-assign]
    scene.note(1, "trainer")
    with pytest.raises(EngineError):
        await asyncio.wait_for(scene.turns.run(), 10)


@asynchronous
async def test_memory_that_nobody_gives_up_is_not_waited_for_for_ever() -> None:
    await until_free(100, lambda: None, 0.0)
    with pytest.raises(StalledError, match="which nvidia-smi lists"):
        await until_free(100, lambda: 99, 0.1)


class Gpu:
    """What two producers share."""

    def __init__(self) -> None:
        self.free, self.is_moving = 10, False

    def try_moving(self) -> ExitStack | None:
        if self.is_moving:
            return None
        self.is_moving, opened = True, ExitStack()
        opened.callback(setattr, self, "is_moving", False)
        return opened


@asynchronous
async def test_of_two_producers_on_a_gpu_each_waits_for_what_it_gave_up_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.app.gpu_turns._POLL_S", 0.001)
    gpu, scenes = Gpu(), [Scene(), Scene()]

    async def move(size: int) -> None:
        for _ in range(5):
            gpu.free += size // 5
            await asyncio.sleep(0.002)

    for scene in scenes:
        scene.turns.free_bytes, scene.turns.try_moving = (lambda: gpu.free), gpu.try_moving
        scene.sleep, scene.wake = partial(move, 100), partial(move, -100)  # type: ignore[method-assign]
    running = [asyncio.create_task(scene.turns.run()) for scene in scenes]
    for scene in scenes:
        scene.note(1, "trainer")
    await until(lambda: all(scene.happened == ["says 1"] for scene in scenes))
    assert gpu.free == 210
    for scene in scenes:  # the first one is back before the second hears of it
        scene.note(2, "producers")
        await until(lambda: scene.gate.is_open)  # noqa: B023 - not beyond this turn of the loop
    assert gpu.free == 10
    for task in running:
        task.cancel()
    await asyncio.wait(running)


@asynchronous
async def test_a_producer_that_moves_for_ever_is_a_stall_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.app.gpu_turns._POLL_S", 0.001)
    scene = Scene()
    scene.turns.try_moving, scene.turns.clock, scene.turns.stall_timeout_s = (lambda: None), time.monotonic, 0.01
    scene.note(1, "trainer")
    with pytest.raises(StalledError, match="another producer"):
        await asyncio.wait_for(scene.turns.run(), 10)
