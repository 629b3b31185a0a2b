"""Leases enter the engine when their policy is there, nothing is paused and there is room."""

from types import SimpleNamespace

import msgspec
import pytest

from protocol.wire.messages import Nack, Sampling
from tests.scripted_trainer import lease
from tests.unit.producer.loop import settle
from tests.unit.producer.policies.test_registry import blob, working
from tests.unit.producer.rollouts.generating import Setup


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


@pytest.mark.parametrize(
    ("on_swap", "holds_versions"), [("finish", True), ("continue", True), ("restart", True), ("finish", False)]
)
@working
async def test_a_group_that_can_only_be_stale_is_ended_and_its_lease_goes_back_unfailed(setup, on_swap, holds_versions):
    setup.registry.max_staleness = 1
    setup.engine.capabilities = SimpleNamespace(holds_versions=holds_versions)
    setup.generation = setup.generation_with(on_swap, setup.engine)
    await setup.publish(3)
    held_out = msgspec.structs.replace(lease(9), sampling=Sampling(1, 6, 0.0), evaluates=blob(3)[0])
    setup.generation.start(held_out)
    setup.generation.start(lease(0))
    await settle()
    await setup.publish(4)
    setup.generation.start(lease(1))
    await settle()
    assert setup.answers == []
    await setup.publish(5)
    await settle()
    assert setup.answers == [Nack("lease-0", "returned")]
    assert (setup.counters.outdated, setup.counters.failed, setup.engine.running) == (1, 0, 2)
    setup.generation.start(lease(2))
    setup.engine.release.set()
    await setup.settle()
    assert {answer.lease_id: answer.policy_version for answer in setup.answers[1:]} == {
        "lease-9": 3, "lease-1": 4, "lease-2": 5,
    }  # fmt: skip


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
async def test_a_lease_waits_for_its_floor_again_if_that_goes_while_paused(setup):
    setup.engine.release.set()
    setup.generation.start(lease(0, policy_floor=2))
    await setup.publish(1)
    await settle()
    setup.access.pause(True)
    await setup.publish(3)
    await settle()
    setup.registry.start_session(blob(2)[0])
    setup.access.pause(False)
    await settle()
    assert setup.answers == []
    await setup.publish(2)
    await setup.settle()
    assert [group.policy_version for group in setup.answers] == [2]
