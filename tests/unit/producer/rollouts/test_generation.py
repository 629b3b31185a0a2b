"""Every lease is answered exactly once, with what the engine sampled or with the reason why not."""

import asyncio

import numpy as np
import pytest

from producer.groups import LeaseFailure
from protocol.errors import EngineError
from protocol.wire.messages import Group, Nack
from tests.scripted_trainer import lease
from tests.unit.producer.loop import settle
from tests.unit.producer.policies.test_registry import blob, working
from tests.unit.producer.rollouts.generating import Setup


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path, 2)


@working
async def test_a_group_or_a_failure_is_the_answer(setup):
    await setup.publish(3)
    setup.engine.release.set()
    for number, prompt in enumerate(["bad", "unscorable", "good"]):
        setup.generation.start(lease(number, prompt=prompt))
    await setup.settle()
    bad, unscorable, group = setup.answers
    assert bad == Nack("lease-0", "bad_prompt", "it is bad")
    assert unscorable == Nack("lease-1", "reward_failed", "it raised")
    assert (group.lease_id, group.policy_version, group.reward_s) == ("lease-2", 3, 0.25)
    assert np.frombuffer(group.prompt_ids, "<i4").tolist() == [7, 8, 9]
    assert np.frombuffer(group.completion_ids, "<i4").tolist() == [0, 1, 2, 2, 3, 2]
    assert np.frombuffer(group.truncated, "u1").tolist() == [0, 1, 0, 1]
    assert (setup.counters.groups, setup.counters.failed) == (1, 2)


@pytest.mark.parametrize(
    ("floor", "paused", "reason", "said"),
    [
        (5, False, "no_policy", "waiting for policy v5"),
        (0, True, "generation_failed", "waiting for room in the engine"),
        (0, False, "generation_failed", "generating"),
    ],
)
@working
async def test_a_lease_past_its_deadline_is_answered(setup, floor, paused, reason, said):
    await setup.publish(0)
    setup.access.pause(paused)
    setup.generation.start(lease(0, policy_floor=floor, timeout_s=0.3))
    await setup.settle()
    (nack,) = setup.answers
    assert (nack.lease_id, nack.reason) == ("lease-0", reason)
    assert f"while {said}" in nack.detail
    assert (setup.engine.running, setup.engine.started_on == [0]) == (0, said == "generating")


@working
async def test_a_timeout_from_below_is_not_the_lease_s(setup):
    await setup.publish(0)
    setup.engine.error = TimeoutError("some socket's")
    setup.engine.release.set()
    setup.generation.start(lease(0))
    await setup.settle()
    (nack,) = setup.answers
    assert (nack.lease_id, nack.reason) == ("lease-0", "generation_failed")
    assert "some socket's" in nack.detail
    assert "lease_timeout_s" not in nack.detail
    assert setup.counters.timed_out == 0


@working
async def test_abandoned_leases_are_not_answered_and_free_their_places(setup):
    await setup.publish(0)
    for number in range(4):
        setup.generation.start(lease(number))
    await settle()
    setup.generation.abandon("lease-0")
    setup.generation.abandon("no such lease")
    await settle()
    assert setup.engine.running == 2
    setup.generation.abandon_all()
    await setup.settle()
    assert (setup.answers, setup.engine.running) == ([], 0)
    await setup.publish(1)
    assert setup.engine.versions == [1]


@working
async def test_a_dead_engine_is_no_answer_but_an_error(setup):
    await setup.publish(0)
    setup.engine.error = EngineError("the engine died")
    setup.engine.release.set()
    setup.generation.start(lease(0))
    await setup.settle()
    assert setup.answers == []
    assert isinstance(setup.tasks[0].exception(), EngineError)


@working
async def test_leases_are_counted_where_they_are(setup):
    def stages():
        work = setup.generation.workload()
        return work.waiting_floors, work.generating, work.scoring

    await setup.publish(1)
    scored = setup.rewards.release = asyncio.Event()
    for number in range(3):
        setup.generation.start(lease(number, policy_floor=1))
    setup.generation.start(lease(3, policy_floor=4))
    assert stages() == ((1, 1, 1, 4), 0, 0)
    await settle()
    assert stages() == ((1, 4), 2, 0)
    setup.engine.release.set()
    await settle()
    assert stages() == ((4,), 0, 3)
    scored.set()
    await settle()
    assert stages() == ((4,), 0, 0)
    setup.generation.hand_back_all()
    setup.generation.start(lease(4))
    assert stages() == ((), 0, 0), "none is begun any more"
    await setup.settle()
    assert sorted(answer.lease_id for answer in setup.answers) == [f"lease-{number}" for number in range(4)]


@working
async def test_while_the_engine_is_out_of_order_leases_go_back_but_for_what_is_generated(setup):
    await setup.publish(1)
    setup.rewards.release = asyncio.Event()
    setup.generation.start(lease(0, policy_floor=1))
    setup.engine.release.set()
    await settle()
    setup.engine.release.clear()
    for number in range(1, 5):
        setup.generation.start(lease(number, policy_floor=1 if number < 4 else 9))
    await settle()
    setup.generation.hand_back_ungenerated()
    assert sorted(answer.lease_id for answer in setup.answers) == [f"lease-{number}" for number in range(1, 5)]
    assert {answer.reason for answer in setup.answers} == {"returned"}
    setup.rewards.release.set()
    setup.engine.release.set()
    setup.generation.start(lease(5))
    await setup.settle()
    assert [answer.lease_id for answer in setup.answers[4:]] == ["lease-0", "lease-5"]


@working
async def test_another_process_of_the_run_lets_work_go_on_and_gets_back_what_might_wait_for_ever(setup):
    await setup.publish(5)
    for number in range(2):
        setup.generation.start(lease(number, policy_floor=5))  # in the engine, on v5
    for number, floor in {2: 5, 3: 4, 4: 3, 5: 6}.items():
        setup.generation.start(lease(number, policy_floor=floor))
    await settle()
    setup.generation.hand_back_above(4)
    setup.registry.start_session(blob(4)[0])
    assert setup.answers == [Nack("lease-2", "returned"), Nack("lease-5", "returned")]
    setup.generation.hand_back_above(4)
    assert len(setup.answers) == 2
    setup.engine.release.set()
    await settle()
    await setup.publish(4)
    await setup.settle()
    answered = [(group.lease_id, group.policy_version) for group in setup.answers[2:]]
    assert answered == [("lease-0", 5), ("lease-1", 5), ("lease-3", 4), ("lease-4", 4)]
    assert setup.engine.versions == [4]
    assert (setup.counters.failed, setup.counters.groups) == (0, 4)


@pytest.mark.parametrize("rounds", range(6))
@working
async def test_a_lease_handed_back_while_it_enters_the_engine_is_answered_once(setup, rounds):
    """However far its task has come when the trainer changes, there is one answer."""
    setup.engine.release.set()
    setup.generation.start(lease(0, policy_floor=1))
    await asyncio.sleep(0)
    await setup.publish(1)
    for _ in range(rounds):
        await asyncio.sleep(0)
    setup.generation.hand_back_above(0)
    setup.registry.start_session(blob(0)[0])
    await setup.settle()
    (answer,) = setup.answers
    assert isinstance(answer, Group) if rounds else answer == Nack("lease-0", "returned")
    await setup.publish(0)
    assert setup.engine.versions == [0]
    assert setup.generation.workload().waiting_floors == ()


@working
async def test_a_lease_that_comes_again_is_not_answered_by_its_first_task(setup):
    await setup.publish(0)
    setup.generation.start(lease(0))
    await settle()
    setup.generation.abandon("lease-0")
    setup.generation.start(lease(0))
    setup.engine.release.set()
    await setup.settle()
    assert len(setup.answers) == 1


@working
async def test_with_agents_the_engine_is_theirs_and_what_nobody_did_goes_back_without_harm(setup):
    class Agents:
        async def generate(self, lease, progress):
            progress.enter("with agents", "generation_failed")
            await settle()
            assert generations[0].workload().with_agents == 1
            raise LeaseFailure("returned", "no agent worked on it")

    generations = []
    setup.generation = setup.generation_from(Agents())
    generations.append(setup.generation)
    await setup.publish(0)
    setup.generation.start(lease(1))
    await setup.settle()
    assert setup.answers == [Nack("lease-1", "returned")]
    assert setup.counters.failed == 0
    assert setup.engine.started_on == []
