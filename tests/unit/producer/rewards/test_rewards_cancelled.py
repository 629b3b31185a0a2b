"""Reward workers and environments, cancelled wherever they wait: no slot, place or process is lost."""

from typing import Any

import msgspec
import pytest

from producer.environments.contract import EnvironmentFailedError
from producer.environments.pool import EnvironmentPool
from producer.environments.worker import Answer as Played
from producer.rewards.messages import Answer, Call, Job, Ready, Scores, Source
from producer.rewards.workers import WorkerLostError, WorkerPool
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.fake_children import FakeChildren, Temper
from tests.unit.producer.loop import asynchronous

every_temper = pytest.mark.parametrize("temper", ["answers", "hangs", "ends"])
NUM_WORKERS = 2


def scored(message: Any) -> Any:
    if not isinstance(message, msgspec.Raw):
        return Ready([])
    return Answer([Scores([1.0])] * len(msgspec.msgpack.decode(message, type=Call).functions))


def pool(start_timeout_s: float = 10.0) -> WorkerPool:
    return WorkerPool({"length": Source("x.py:length")}, NUM_WORKERS, None, start_timeout_s)


@every_temper
@asynchronous
async def test_the_slot_of_a_call_goes_back_wherever_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, temper: Temper
) -> None:
    monkeypatch.setattr("producer.rewards.workers._POLL_S", 0.001)
    children, workers = FakeChildren(monkeypatch, scored), pool()
    await workers.start()

    async def call(limit_s: float) -> list[Scores]:
        return await workers.call([0], [Job("p", ["c"], [[1]], {})], [limit_s])

    async def calls() -> None:
        children.temper = temper
        try:
            await call(0.004 if temper == "hangs" else 60.0)
        except WorkerLostError:
            assert temper != "answers"
        children.temper = "answers"
        assert (await call(30.0))[0].rewards == [1.0]

    def nothing_is_lost() -> None:
        assert workers.num_idle == NUM_WORKERS
        assert children.num_running <= NUM_WORKERS

    assert await cancel_at_each_wait(calls, nothing_is_lost) > 2
    await workers.close()
    assert children.num_running == 0


@every_temper
@asynchronous
async def test_workers_that_start_are_ended_where_their_start_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, temper: Temper
) -> None:
    children = FakeChildren(monkeypatch, scored)
    children.when_starting = temper

    async def life() -> None:
        workers = pool(60.0 if temper == "answers" else 0.01)
        try:
            await workers.start()
        except ConfigError:
            assert temper != "answers"
        finally:
            await workers.close()

    def nothing_runs() -> None:
        assert children.num_running == 0

    assert await cancel_at_each_wait(life, nothing_runs) > 1


@every_temper
@asynchronous
async def test_the_place_of_an_episode_goes_back_wherever_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, temper: Temper
) -> None:
    children = FakeChildren(monkeypatch, lambda _: Played("seen"))
    limit_s = 0.002 if temper == "hangs" else 60.0
    settings = {"factory": "x.py:Shop", "max_concurrent": 1, "call_timeout_s": limit_s}
    environments = EnvironmentPool(EnvironmentSection.model_validate(settings))

    async def episode(temper: Temper, start_timeout_s: float) -> None:
        children.temper = temper
        monkeypatch.setattr("producer.environments.pool._START_TIMEOUT_S", start_timeout_s)
        async with environments.session() as environment:
            assert await environment.reset({}) == "seen"

    async def episodes() -> None:
        try:
            await episode(temper, 0.0)
        except EnvironmentFailedError:
            assert temper != "answers"
        await episode("answers", 60.0)  # where the one before did not answer, this is a new one

    def nothing_is_lost() -> None:
        assert not environments._slots.locked()
        assert children.num_running <= 1

    assert await cancel_at_each_wait(episodes, nothing_is_lost) > 2
    await environments.close()
    assert children.num_running == 0


@asynchronous
async def test_what_cannot_be_sent_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    children, workers = FakeChildren(monkeypatch, scored), pool()
    await workers.start()
    for columns in ({"text": "half a character \ud800"}, {"number": 2**70}):
        with pytest.raises(WorkerLostError) as caught:
            await workers.call([0], [Job("p", ["c"], [[1]], columns)], [1.0])
        assert caught.value.reason == "invalid"
    assert (workers.num_idle, children.num_running) == (NUM_WORKERS, NUM_WORKERS)
    await workers.close()
