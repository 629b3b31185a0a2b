"""Whatever tasks wait, are cancelled and are given, nothing is lost, and nothing is given to somebody who is gone."""

import asyncio

from producer.waiting_line import WaitingLine
from tests.unit.producer.loop import asynchronous, settle


@asynchronous
async def test_wishes_stand_in_order_and_who_is_cancelled_is_gone_at_once():
    line, returned = WaitingLine[str](), list[bool]()
    tasks = [asyncio.create_task(line.wait(wish, lambda: returned.append(True))) for wish in "abc"]
    await settle()
    assert line.wishes == ["a", "b", "c"]
    tasks[1].cancel()
    await asyncio.sleep(0)
    line.give()
    assert line.wishes == ["c"]
    await tasks[0]
    line.give()
    await tasks[2]
    assert (line._turns, returned) == ({}, [])


@asynchronous
async def test_a_turn_that_a_cancelled_task_was_given_goes_back_once():
    line, returned = WaitingLine[None](), list[bool]()
    waiting = asyncio.create_task(line.wait(None, lambda: returned.append(True)))
    await asyncio.sleep(0)
    line.give()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (line._turns, returned) == ({}, [True])
