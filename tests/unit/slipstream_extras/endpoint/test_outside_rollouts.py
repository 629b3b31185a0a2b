"""Leases whose rollouts come from outside: agents and environments of Atropos."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from producer.engine_gate import EngineGate
from producer.groups import LeaseFailure, Rollouts
from producer.rollouts.engine_access import EngineAccess, Progress
from protocol.wire.messages import Sampling
from slipstream_extras.endpoint.agent_rollouts import AgentRollouts
from slipstream_extras.endpoint.atropos.atropos import AtroposRollouts
from tests.policies import Policies
from tests.scripted_trainer import lease
from tests.unit.producer.loop import asynchronous, settle

SAMPLING = Sampling(2, 8, 1.0)
POSTED = Rollouts([], 2.5, [], np.array([[0.0], [1.0]], np.float32))


class Prompts:
    async def in_thread(self, work, *args):
        return work(*args)

    def decode(self, prompt, completions):
        return [str(ids) for ids in completions]


class Outside:
    """Both `Agents` and `Atropos`, as far as leases see them."""

    sampling = SAMPLING
    reward_names = ("solved",)

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def fulfil(self, asked, waited_s=None, environment=""):
        self.asked.append(asked)
        return POSTED if waited_s is None else (POSTED.episodes, POSTED.own_rewards, POSTED.generation_s)


@pytest.mark.parametrize("kind", ["agents", "atropos"])
@asynchronous
async def test_nobody_is_asked_before_the_policy_is_there_and_while_generation_is_paused(kind):
    outside, policies = Outside(), Policies()
    gate = EngineAccess(policies, None, SimpleNamespace(gate=EngineGate()))  # type: ignore[arg-type]
    source = (
        AgentRollouts(outside, gate, Prompts(), ("solved",))  # type: ignore[arg-type]
        if kind == "agents"
        else AtroposRollouts(outside, gate, ("solved",))  # type: ignore[arg-type]
    )
    assert source.reward_names == ("solved",)
    work = lease(7, sampling=SAMPLING, policy_floor=1)
    progress = Progress(work)
    generating = asyncio.create_task(source.generate(work, progress))
    policies.swap(0)
    await settle()
    gate.pause(True)
    policies.swap(1)
    await settle()
    assert (progress.stage, outside.asked) == ("waiting", [])
    gate.pause(False)
    posted = await generating
    assert (posted.episodes, posted.completions, posted.generation_s) == ([], [], 2.5)
    np.testing.assert_array_equal(posted.own_rewards, POSTED.own_rewards)
    assert progress.stage == "with agents"
    assert outside.asked == [work if kind == "agents" else 1]


@asynchronous
async def test_a_lease_of_atropos_goes_back_when_its_time_is_over_and_fails_where_the_sides_differ():
    source = AtroposRollouts(Outside(), EngineAccess(Policies(), None, None), ("solved",))  # type: ignore[arg-type]
    late = lease(8, sampling=SAMPLING, timeout_s=0.05)
    for work, reason in ((late, "returned"), (lease(9), "generation_failed")):
        with pytest.raises(LeaseFailure) as failure:
            await source.generate(work, Progress(work))
        assert failure.value.reason == reason
