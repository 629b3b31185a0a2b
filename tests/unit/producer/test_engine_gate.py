"""Once the gate is closed nobody is in the engine, and whoever was in it has left in its own time or when that was over."""

import asyncio
import math
from contextlib import suppress

import pytest

from producer.engine_gate import EngineGate
from tests.unit.producer.loop import asynchronous, settle, until


class Guest:
    """Is in the engine until it is told to leave, or ends by itself."""

    def __init__(self, gate: EngineGate, after_s: float = math.inf) -> None:
        self.told, self.ended, self.is_inside = asyncio.Event(), asyncio.Event(), False
        self.task = asyncio.create_task(self._stay(gate, after_s))

    async def _stay(self, gate: EngineGate, after_s: float) -> None:
        async with gate.use(self._leave, after_s):
            self.is_inside = True
            await self.ended.wait()
        self.is_inside = False

    def _leave(self) -> None:
        self.told.set()
        self.ended.set()


@asynchronous
async def test_what_runs_ends_and_what_comes_later_waits():
    gate = EngineGate()
    inside = Guest(gate)
    await settle()
    closing = asyncio.create_task(gate.close(60.0))
    await settle()
    later = Guest(gate)
    await settle()
    assert inside.is_inside
    assert [inside.told.is_set(), later.is_inside, gate.is_open, closing.done()] == [False] * 4
    inside.ended.set()
    await closing
    assert not later.is_inside
    gate.open()
    await settle()
    assert later.is_inside
    later.ended.set()
    await later.task


@pytest.mark.parametrize(("after_s", "within_s"), [(0.0, 60.0), (math.inf, 0.0)])
@asynchronous
async def test_who_may_be_cut_leaves_at_once_and_who_stays_too_long_leaves_then(after_s, within_s):
    gate = EngineGate()
    guest = Guest(gate, after_s)
    await settle()
    await gate.close(within_s)
    assert guest.told.is_set()
    assert not guest.is_inside


@asynchronous
async def test_a_turn_that_is_not_wanted_any_more_cuts_nobody():
    gate = EngineGate()
    guest = Guest(gate, after_s=0.3)
    await settle()
    closing = asyncio.create_task(gate.close(0.3))
    await settle()
    closing.cancel()
    with suppress(asyncio.CancelledError):
        await closing
    assert gate.is_open
    await asyncio.sleep(0.4)
    assert guest.is_inside
    guest.ended.set()
    await guest.task


@asynchronous
async def test_who_is_slow_to_leave_is_told_once_however_many_turns_come():
    gate, told, ended = EngineGate(), [], asyncio.Event()

    async def stay() -> None:
        async with gate.use(lambda: told.append(1)):
            await ended.wait()

    slow = asyncio.create_task(stay())
    await settle()
    for _ in range(2):
        closing = asyncio.create_task(gate.close(0.0))
        await until(lambda: told)
        await settle()
        closing.cancel()
        await asyncio.wait([closing])
    assert told == [1]
    ended.set()
    await slow


@asynchronous
async def test_upkeep_enters_while_others_leave_and_waits_while_the_engine_sleeps():
    gate, done = EngineGate(), []

    async def unload(number: int) -> None:
        async with gate.upkeep():
            done.append(number)

    guest = Guest(gate)
    await settle()
    closing = asyncio.create_task(gate.close(60.0))
    await settle()
    await unload(1)  # the guest may wait for it
    guest.ended.set()
    await closing
    unloading = asyncio.create_task(unload(2))
    await settle()
    assert done == [1]
    gate.open()
    await unloading
    assert done == [1, 2]
