"""Room in the engine for clients: bounded, in order, and given back whatever happens."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.calls.refusals import RefusedError
from producer.serving.client_limits import ClientLimiter
from tests.unit.producer.loop import asynchronous


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


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans()), max_size=20))
@asynchronous
async def test_places_are_never_exceeded_and_all_come_back(requests):
    limiter = ClientLimiter(4, max_waiting=100)

    async def request(count: int, turns: int) -> None:
        async with limiter.take(count):
            assert limiter.taken <= 4
            for _ in range(turns):
                await asyncio.sleep(0)

    tasks = []
    for count, turns, cancelled in requests:
        tasks.append(asyncio.create_task(request(count, turns)))
        if cancelled:
            await asyncio.sleep(0)
            tasks[len(tasks) // 2].cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert ended is None or isinstance(ended, asyncio.CancelledError)
    assert (limiter.taken, limiter.num_waiting) == (0, 0)
