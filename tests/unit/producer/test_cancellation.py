"""The helper itself finds what a cancellation leaves behind."""

import asyncio

import pytest

from tests.unit.producer.cancellation import cancel_at_each_wait


class Slot:
    taken = runs = 0

    async def use(self, *, gives_back_first: bool) -> None:
        self.runs += 1
        self.taken += 1
        try:
            await asyncio.create_task(asyncio.sleep(0))
        finally:
            self.taken -= gives_back_first
            await asyncio.sleep(0)
            self.taken -= not gives_back_first

    def check(self) -> None:
        assert self.taken == 0


def test_every_wait_is_cancelled_once_and_the_last_run_ends():
    slot = Slot()
    assert asyncio.run(cancel_at_each_wait(lambda: slot.use(gives_back_first=True), slot.check)) == 2
    assert slot.runs == 5, "alone and repeatedly at both, and to the end"


def test_a_wait_before_what_is_given_back_is_found():
    slot = Slot()
    with pytest.raises(AssertionError) as found:
        asyncio.run(cancel_at_each_wait(lambda: slot.use(gives_back_first=False), slot.check))
    assert found.value.__notes__ == ["cancelled at wait 1 and at all that followed"]
