"""Several environments: whose source a lease goes to, and the columns of its rewards."""

import asyncio

import msgspec
import numpy as np
import pytest

from producer.groups import Episode, LeaseFailure, Rollouts
from producer.rollouts.engine_access import Progress
from producer.rollouts.routed import RoutedRollouts
from protocol.wire.messages import Lease
from tests.scripted_trainer import lease

NAN = np.nan


class Source:
    def __init__(self, *reward_names: str) -> None:
        self.reward_names = reward_names

    async def generate(self, work: Lease, progress: Progress) -> Rollouts:
        if work.prompt == "hang":
            await asyncio.Event().wait()
        if work.prompt == "bad":
            raise LeaseFailure("environment_failed", "it is bad")
        own = np.array([range(1, 1 + len(self.reward_names))] * 2, np.float32)
        return Rollouts([Episode(0, []), Episode(0, [])], 0.5, ["a", "b"], own)


SOURCES = {"single_turn": Source(), "shop": Source("shop"), "maze": Source("solved", "maze")}
ROUTED = RoutedRollouts(SOURCES, ("solved", "shop", "maze"))


def rolled(name: str | None, prompt: str = "1+1=") -> Rollouts:
    columns = {} if name is None else {"environment": name}
    work = msgspec.structs.replace(lease(1), prompt=prompt, columns=columns)
    return asyncio.run(ROUTED.generate(work, Progress(work)))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        (None, [NAN, NAN, NAN]),
        ("single_turn", [NAN, NAN, NAN]),
        ("shop", [NAN, 1, NAN]),
        ("maze", [1, NAN, 2]),
    ],
)
def test_rewards_of_other_environments_are_missing(name: str | None, rewards: list[float]) -> None:
    np.testing.assert_array_equal(rolled(name).own_rewards, np.array([rewards] * 2, np.float32))


def test_a_row_of_an_environment_that_only_the_trainer_has_is_tried_again() -> None:
    with pytest.raises(LeaseFailure, match="'shp'") as caught:
        rolled("shp")
    assert caught.value.reason == "generation_failed", "another producer may have it"


def test_an_environment_that_hangs_or_fails_holds_up_no_other() -> None:
    async def body() -> list[object]:
        works = [
            msgspec.structs.replace(lease(number), prompt=prompt, columns={"environment": name})
            for number, (prompt, name) in enumerate([("hang", "shop"), ("bad", "shop"), ("1+1=", "maze")])
        ]
        tasks = [asyncio.create_task(ROUTED.generate(work, Progress(work))) for work in works]
        done, hanging = await asyncio.wait(tasks, timeout=0.05)
        assert hanging == {tasks[0]}
        tasks[0].cancel()
        return [tasks[1].exception(), tasks[2].exception(), len(done)]

    failed, fine, count = asyncio.run(body())
    assert isinstance(failed, LeaseFailure)
    assert (fine, count) == (None, 2)
