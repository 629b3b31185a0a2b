"""Nothing of a call stays in the engine, whoever reads it and wherever its end is cut off."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from producer.engine_contract import Adapter
from slipstream_extras.endpoint.openai import Call
from tests.unit.producer.cancellation import cancel_at_each_wait


class Engine:
    """Samples one token after the other for each prompt."""

    def __init__(self) -> None:
        self.running: set[int] = set()

    async def generate(self, call: Call, prompt: int, length: int) -> AsyncGenerator[int, None]:
        call.note_reader(str(prompt))
        self.running.add(prompt)
        try:
            for token in range(length):
                await asyncio.sleep(0)
                yield token
                call.note_reader(str(prompt))
        finally:
            self.running.discard(prompt)


async def merged(*generators: AsyncGenerator[int, None]) -> AsyncGenerator[int, None]:
    """As vLLM does with several prompts: a task reads each, and stays when this is left where it yields."""

    def read(generator: AsyncGenerator[int, None]) -> asyncio.Future[int]:
        reader = asyncio.ensure_future(anext(generator))
        reader.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio wants somebody to look
        return reader

    reading = {read(generator): generator for generator in generators}
    while reading:
        done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            generator = reading.pop(task)
            try:
                token = task.result()
            except StopAsyncIteration:
                continue
            reading[read(generator)] = generator
            yield token


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_call_that_is_cancelled_anywhere_leaves_nothing_in_the_engine(num_prompts):
    engine = Engine()

    async def work() -> None:
        call = Call(Adapter(1, "v1", 1, Path("unused")))
        generators = [call.add(str(n), engine.generate(call, n, 2 + n)) for n in range(num_prompts)]
        call.add("never read", engine.generate(call, 99, 1))
        try:
            async with aclosing(generators[0] if num_prompts == 1 else merged(*generators)) as tokens:
                async for _ in tokens:
                    await asyncio.sleep(0)  # a client reads it
        finally:
            await call.close()
            assert not engine.running, "before its version is let go"

    def check() -> None:
        assert not engine.running
        assert len(asyncio.all_tasks()) == 1

    assert asyncio.run(cancel_at_each_wait(work, check)) >= 4
