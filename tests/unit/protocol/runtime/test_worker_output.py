"""What children write, through a real pipe into the log."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from protocol.runtime.child import WorkerOutput
from protocol.runtime.logs import Throttle
from tests.unit.producer.loop import until


@pytest.fixture(autouse=True)
def _listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="protocol.test")


def with_output(use: Callable[[WorkerOutput, int], Awaitable[None]]) -> None:
    async def body() -> None:
        reading, writing = os.pipe()
        output = WorkerOutput(reading, Throttle(logging.getLogger("protocol.test")), "loading")
        try:
            await use(output, writing)
        finally:
            output.close()
            output.close()
            os.close(writing)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_source_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def use(output: WorkerOutput, writing: int) -> None:
        os.write(writing, b"imported\n")
        output.begin("reward length")
        os.write(writing, b"one\ntwo\n")
        output.begin("reward length")
        os.write(writing, b"\xffthree")
        output.begin("reward words")
        os.write(writing, b" \n ")

    with_output(use)
    assert caplog.messages == ["loading wrote: imported", "reward length wrote: one\ntwo\n\ufffdthree"]


def test_what_is_written_shows_while_the_process_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def use(_output: WorkerOutput, writing: int) -> None:
        os.write(writing, b"still here")
        await until(lambda: caplog.messages)
        assert caplog.messages == ["loading wrote: still here"]

    with_output(use)


@pytest.mark.long
def test_much_is_cut_and_counted_and_keeps_neither_loop_nor_writer(caplog: pytest.LogCaptureFixture) -> None:
    """Who writes waits for its pipe, and the loop reads only so often."""
    num_bytes = 20 * 2**20

    def write(descriptor: int) -> None:
        left = num_bytes
        while left:
            left -= os.write(descriptor, b"x" * min(left, 2**16))

    async def use(output: WorkerOutput, writing: int) -> None:
        writer = threading.Thread(target=write, args=(writing,))
        writer.start()
        started, turns = time.monotonic(), 0
        while writer.is_alive():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20 * (time.monotonic() - started)
        output.close()

    with_output(use)
    assert sum(len(message) for message in caplog.messages) < 6000 * len(caplog.messages)
    assert caplog.messages[0].startswith("loading wrote: xxxx")
    assert caplog.messages[0].endswith(" more bytes)")


def test_a_flood_is_throttled(caplog: pytest.LogCaptureFixture) -> None:
    async def use(output: WorkerOutput, writing: int) -> None:
        for number in range(100):
            output.begin(f"reward {'ab'[number % 2]}")
            os.write(writing, b"again")

    with_output(use)
    assert caplog.messages == ["reward a wrote: again", "reward b wrote: again"] * 5
