"""The helper itself finds what a cancellation leaves behind."""

import asyncio

import pytest

from tests.unit.producer.cancellation import cancel_at_each_wait


class Slot:
    def __init__(self) -> None:
        self.taken = self.runs = 0

    async def careful(self) -> None:
        self.runs += 1
        self.taken += 1
        try:
            await asyncio.sleep(0)
            await asyncio.create_task(asyncio.sleep(0.001))
        finally:
            self.taken -= 1
            await asyncio.sleep(0)

    async def careless(self) -> None:
        self.taken += 1
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            self.taken -= 1

    def check(self) -> None:
        assert self.taken == 0


def test_every_wait_is_cancelled_once_and_the_last_run_ends():
    slot = Slot()
    assert asyncio.run(cancel_at_each_wait(slot.careful, slot.check)) == 3
    assert slot.runs == 7, "alone and repeatedly at each of three, and to the end"


def test_a_wait_before_what_is_given_back_is_found():
    slot = Slot()
    with pytest.raises(AssertionError) as found:
        asyncio.run(cancel_at_each_wait(slot.careless, slot.check))
    assert found.value.__notes__ == ["cancelled at wait 1 and at all that followed"]
