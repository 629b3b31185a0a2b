"""Leases enter the engine when their policy is there, nothing is paused and there is room."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from producer.groups import LeaseFailure
from producer.rollouts import admission
from producer.rollouts.routed import RoutedRollouts
from producer.rollouts.single_turn import PlainRollouts
from protocol.config.environments import COLUMN
from protocol.wire.messages import Nack, Sampling
from tests.scripted_trainer import lease
from tests.unit.producer.loop import settle, until
from tests.unit.producer.policies.test_registry import blob, working
from tests.unit.producer.rollouts.generating import Prompts, Setup


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


class Hanging(PlainRollouts):
    """Rollouts whose environment does not answer until `answers` is set, once for the first turn and again for the last."""

    answers: asyncio.Event

    async def generate(self, lease, progress):
        async with self.access.enter(lease, progress) as sample:
            for _ in range(2):
                await self.answers.wait()
                await sample([7], lease.sampling)
        return await super().generate(lease, progress)


@pytest.mark.long
@pytest.mark.parametrize("evaluated", [False, True])
@working
async def test_leases_of_an_environment_that_hangs_keep_no_other_from_the_engine(setup, monkeypatch, evaluated):
    monkeypatch.setattr(admission, "IDLE_S", 0.01)
    setup.engine.release.set()
    hanging = Hanging(setup.access, Prompts())
    hanging.answers = asyncio.Event()
    sources = {"maze": hanging, "shop": PlainRollouts(setup.access, Prompts())}
    setup.generation = setup.generation_from(RoutedRollouts(sources, ()))
    await setup.publish(3)
    evaluates = blob(3)[0] if evaluated else None
    leases = [lease(number, columns={COLUMN: "maze" if number < 20 else "shop"}) for number in range(23)]
    for each in leases:
        setup.generation.start(msgspec.structs.replace(each, evaluates=evaluates))
    await until(lambda: len(setup.answers) == 3)
    assert {answer.lease_id for answer in setup.answers} == {"lease-20", "lease-21", "lease-22"}
    hanging.answers.set()
    await setup.settle()
    assert len({answer.lease_id for answer in setup.answers}) == 23
    assert not any(isinstance(answer, Nack) for answer in setup.answers)


@working
async def test_a_group_whose_environment_is_slow_to_begin_is_sampled_by_the_newest_policy(setup):
    await setup.publish(3)
    began, leased = asyncio.Event(), lease(0, policy_floor=3)

    class SlowToBegin(PlainRollouts):
        async def generate(self, lease, progress):
            async with self.access.enter(lease, progress) as sample:
                await began.wait()
                both = asyncio.gather(*(sample([7], lease.sampling) for _ in range(2)))
                await settle()
                await setup.publish(5)
                setup.engine.release.set()
                await both
                await sample([7], lease.sampling)
            raise LeaseFailure("bad_prompt", "enough")

    setup.generation = setup.generation_from(SlowToBegin(setup.access, Prompts()))
    setup.generation.start(leased)
    await settle()
    await setup.publish(4)
    began.set()
    await setup.settle()
    assert setup.engine.started_on == [4, 4, 4], "the one that was current when it sampled first, to the end"
    assert setup.engine.versions == [5]


@pytest.mark.long
@working
async def test_a_group_that_has_begun_goes_on_while_others_wait_for_the_end_of_a_pause(setup, monkeypatch):
    monkeypatch.setattr(admission, "IDLE_S", 0.01)
    setup.engine.release.set()
    await setup.publish(0)
    answers, begun = asyncio.Event(), list[str]()

    class Slow(PlainRollouts):
        async def generate(self, lease, progress):
            async with self.access.enter(lease, progress) as sample:
                await sample([7], lease.sampling)
                begun.append(lease.lease_id)
                await answers.wait()
                await sample([7], lease.sampling)
            raise LeaseFailure("bad_prompt", "enough")

    setup.generation = setup.generation_from(Slow(setup.access, Prompts()))
    for number in range(2):  # all places
        setup.generation.start(lease(number))
    await until(lambda: len(begun) == 2 and not setup.admission._inside)
    setup.access.pause(True)
    for number in range(2, 5):
        setup.generation.start(lease(number))
    await settle()
    answers.set()
    await until(lambda: len(setup.answers) == 2)
    assert begun == ["lease-0", "lease-1"]
    setup.access.pause(False)
    await setup.settle()
    assert len(setup.answers) == 5
