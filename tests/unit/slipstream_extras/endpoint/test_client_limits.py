"""Room in the engine for clients: bounded, in order, and given back whatever happens."""

import asyncio

import pytest

from slipstream_extras.endpoint.openai import RefusedError
from slipstream_extras.endpoint.versions import ClientLimiter
from tests.unit.producer.loop import asynchronous, settle


@asynchronous
async def test_who_waits_longest_enters_first_and_too_many_are_refused():
    limiter, entered = ClientLimiter(4, max_waiting=2), []

    async def request(name: str, count: int, gate: asyncio.Event) -> None:
        async with limiter.take(count):
            entered.append(name)
            await gate.wait()

    gate, never = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(request("three", 3, gate))
    await asyncio.sleep(0)
    big = asyncio.create_task(request("two", 2, never))
    await asyncio.sleep(0)
    small = asyncio.create_task(request("one", 1, never))  # would fit, but it came later
    await asyncio.sleep(0)
    assert (entered, limiter.taken, limiter.num_waiting) == (["three"], 3, 2)
    with pytest.raises(RefusedError, match=r"2 requests wait already \(serve.max_waiting\)") as refused:
        async with limiter.take(1):
            pass
    assert refused.value.status == 429
    with pytest.raises(RefusedError, match=r"5 completions are more than the 4 of serve.max_requests"):
        async with limiter.take(5):
            pass
    gate.set()
    await first
    await asyncio.sleep(0)
    assert (entered, limiter.taken) == (["three", "two", "one"], 3)
    for task in (big, small):
        task.cancel()
    await asyncio.gather(big, small, return_exceptions=True)
    assert (limiter.taken, limiter.num_waiting) == (0, 0)


@asynchronous
async def test_who_gives_up_holds_nobody_up_and_what_it_was_just_given_comes_back():
    limiter, gate = ClientLimiter(4, max_waiting=9), asyncio.Event()

    async def request(count: int) -> None:
        async with limiter.take(count):
            await gate.wait()

    three, two, one = [asyncio.create_task(request(count)) for count in (3, 2, 1)]
    await settle()
    two.cancel()
    await settle()
    assert (limiter.taken, limiter.num_waiting) == (4, 0), "the smaller one stood behind it"
    two = asyncio.create_task(request(2))
    await settle()
    three.cancel()
    await asyncio.sleep(0)
    two.cancel()
    await settle()
    assert (limiter.taken, limiter.num_waiting) == (1, 0)
    one.cancel()
    await settle()
    assert limiter.taken == 0
