"""Leases enter the engine when their policy is there, nothing is paused and there is room."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from producer.interfaces import Adapter, Completion
from protocol.wire.messages import Nack, Sampling
from tests.scripted_trainer import lease
from tests.unit.producer.loop import settle
from tests.unit.producer.policies.test_adapters import blob
from tests.unit.producer.rollouts.generating import Setup, SlowEngine, working


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path, 2)


@working
async def test_an_evaluation_is_answered_by_the_version_that_it_names_beside_newer_groups(setup):
    await setup.publish(3)
    held_out = msgspec.structs.replace(lease(1), sampling=Sampling(1, 6, 0.0), policy_floor=3, evaluates=blob(3)[0])
    setup.generation.start(held_out)
    await settle()
    await setup.publish(5)
    setup.generation.start(lease(2))
    setup.generation.start(msgspec.structs.replace(held_out, lease_id="lease-3"))
    await settle()
    assert sorted(setup.engine.started_on) == [3, 3, 5]
    setup.engine.release.set()
    await setup.settle()
    assert {answer.lease_id: answer.policy_version for answer in setup.answers} == {
        "lease-1": 3, "lease-2": 5, "lease-3": 3,
    }  # fmt: skip
    assert setup.engine.versions == [3, 5], "what is evaluated stays until another version is"


@working
async def test_an_evaluation_whose_weights_changed_in_between_is_handed_back_as_such(setup):
    class Merging(SlowEngine):
        async def generate(self, prompt_ids, sampling, adapter, cut):
            return [Completion([5, 2], [-0.5, -0.5], False, [3, 4])]

    setup.generation = setup.generation_with("finish", Merging())
    await setup.publish(3)
    setup.generation.start(
        msgspec.structs.replace(lease(1), sampling=Sampling(1, 6, 0.0), policy_floor=3, evaluates=blob(3)[0])
    )
    await setup.settle()
    assert setup.answers == [Nack("lease-1", "no_policy", "v3 is evaluated, and newer weights came in between")]


@working
async def test_no_more_groups_than_places_are_in_the_engine_and_late_ones_get_the_newest_policy(setup):
    await setup.publish(0)
    for number in range(5):
        setup.generation.start(lease(number))
    await settle()
    assert setup.engine.running == 2
    await setup.publish(1)
    setup.engine.release.set()
    await setup.settle()
    assert setup.engine.most_running == 2
    assert setup.engine.started_on == [0, 0, 1, 1, 1]
    assert sorted(group.policy_version for group in setup.answers) == [0, 0, 1, 1, 1]
    assert setup.engine.versions == [1]


@working
async def test_a_lease_waits_for_its_policy_floor(setup):
    setup.engine.release.set()
    setup.generation.start(lease(0, policy_floor=2))
    for version in (0, 1):
        await setup.publish(version)
        await settle()
        assert setup.answers == []
    await setup.publish(2)
    await setup.settle()
    assert [group.policy_version for group in setup.answers] == [2]


@working
async def test_busy_time_is_the_union_of_running_requests(setup, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("producer.rollouts.in_flight.time", SimpleNamespace(monotonic=lambda: now[0]))
    await setup.publish(0)
    for number in range(2):
        setup.generation.start(lease(number))
        await settle()
        now[0] += 2.0
    assert setup.generation.workload().busy_s == 4.0
    setup.engine.release.set()
    await setup.settle()
    now[0] += 1.0
    assert setup.generation.workload().busy_s == 4.0


@working
async def test_while_paused_nothing_enters_the_engine_and_what_is_in_it_goes_on(setup):
    await setup.publish(0)
    setup.generation.start(lease(0))
    await settle()
    setup.access.pause(True)
    for number in range(1, 4):
        setup.generation.start(lease(number, policy_floor=1))
    setup.engine.release.set()
    await setup.publish(1)
    await settle()
    assert [group.lease_id for group in setup.answers] == ["lease-0"]
    assert setup.generation.workload().waiting_floors == (1, 1, 1)
    await setup.publish(2)
    setup.access.pause(False)
    await setup.settle()
    assert setup.engine.started_on == [0, 2, 2, 2]
    assert len(setup.answers) == 4


@working
async def test_a_version_that_goes_while_paused_is_waited_for_again(setup):
    await setup.publish(3)
    setup.engine.release.set()
    setup.access.pause(True)
    setup.generation.start(lease(0, policy_floor=2))
    await settle()
    setup.registry.start_session(blob(2)[0])
    setup.access.pause(False)
    await settle()
    assert setup.answers == []
    await setup.publish(2)
    await setup.settle()
    assert [group.policy_version for group in setup.answers] == [2]


@working
async def test_a_lease_that_finds_no_room_in_time_says_so(setup):
    await setup.publish(0)
    setup.access.pause(True)
    setup.generation.start(lease(0, timeout_s=0.2))
    await setup.settle()
    (nack,) = setup.answers
    assert (nack.reason, setup.engine.started_on) == ("generation_failed", [])
    assert "while waiting for room in the engine" in nack.detail


class CutEngine(SlowEngine):
    """Samples one token before a swap, and two after it."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        if adapter.version == 3:
            await cut.wait()
            return [Completion([5], [-0.5], False, [3], cut=True) for _ in range(sampling.num_generations)]
        return [Completion([6, 2], [-1.0, -1.5], False, [adapter.version] * 2)]


@working
async def test_a_group_that_was_cut_has_the_version_of_each_token_and_is_as_old_as_its_oldest(setup):
    setup.generation = setup.generation_with("continue", CutEngine())
    await setup.publish(3)
    setup.generation.start(lease(1))
    await settle()
    setup.access.pause(True)  # nothing begins, but what is in the engine goes on
    await setup.publish(5)
    await setup.settle()
    (group,) = setup.answers
    assert group.policy_version == 3
    assert np.frombuffer(group.token_versions, "<i4").tolist() == [3, 5, 5] * 4
    assert np.frombuffer(group.completion_ids, "<i4").tolist() == [5, 6, 2] * 4
    assert np.frombuffer(group.logprobs, "<f4").tolist() == [-0.5, -1.0, -1.5] * 4
    assert (setup.engine.versions, setup.counters.cut, setup.counters.tokens) == ([5], 4, 12)
