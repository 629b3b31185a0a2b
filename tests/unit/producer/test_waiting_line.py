"""Whatever tasks wait, are cancelled and are given, nothing is lost, and nothing is given to somebody who is gone."""

import asyncio

import pytest

from producer.waiting_line import WaitingLine
from tests.unit.producer.loop import asynchronous, settle


@asynchronous
async def test_wishes_stand_in_order_and_who_is_cancelled_is_gone_at_once():
    line, returned = WaitingLine[str, int](), list[int]()
    first, second, third = [asyncio.create_task(line.wait(wish, returned.append)) for wish in "abc"]
    await settle()
    assert line.wishes == ["a", "b", "c"]
    second.cancel()
    await asyncio.sleep(0)
    line.give(7, place=1)
    assert line.wishes == ["a"]
    assert await third == 7
    line.refuse(ValueError("closed"))
    with pytest.raises(ValueError, match="closed"):
        await first
    assert (line._turns, returned) == ({}, [])


@pytest.mark.parametrize("comes", ["given", "refused"])
@asynchronous
async def test_what_a_cancelled_task_was_given_goes_back_once(comes):
    line, returned = WaitingLine[None, int](), list[int]()
    waiting = asyncio.create_task(line.wait(None, returned.append))
    await asyncio.sleep(0)
    if comes == "given":
        line.give(7)
    else:
        line.refuse(ValueError())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert returned == ([7] if comes == "given" else [])
    assert line._turns == {}
