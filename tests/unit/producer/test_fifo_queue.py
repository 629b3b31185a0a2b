"""Whatever tasks wait, are cancelled and are given, nothing is lost, and nothing is given to somebody who is gone."""

import asyncio

from producer.engine_gate import FifoQueue
from tests.unit.producer.loop import asynchronous, settle


@asynchronous
async def test_requests_stand_in_order_and_who_is_cancelled_is_gone_at_once():
    line, returned = FifoQueue[str](), list[bool]()
    tasks = [asyncio.create_task(line.wait(wish, lambda: returned.append(True))) for wish in "abc"]
    await settle()
    assert line.pending == ["a", "b", "c"]
    tasks[1].cancel()
    await asyncio.sleep(0)
    line.grant()
    assert line.pending == ["c"]
    await tasks[0]
    line.grant()
    await tasks[2]
    assert (line._grants, returned) == ({}, [])


@asynchronous
async def test_a_turn_that_a_cancelled_task_was_given_goes_back_once():
    line, returned = FifoQueue[None](), list[bool]()
    waiting = asyncio.create_task(line.wait(None, lambda: returned.append(True)))
    await asyncio.sleep(0)
    line.grant()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (line._grants, returned) == ({}, [True])


@asynchronous
async def test_early_requests_stand_before_the_others_in_their_own_order():
    line = FifoQueue[str]()
    tasks = [asyncio.create_task(line.wait(wish, lambda: None, early=wish in "bd")) for wish in "abcd"]
    await settle()
    assert line.pending == ["b", "d", "a", "c"]
    line.grant()
    await tasks[1]
    assert line.pending == ["d", "a", "c"]
    for _ in range(3):
        line.grant()
    await asyncio.gather(*tasks)
