"""Rollouts that outside agents generate through the endpoint and score, or that environments of Atropos post.

Guarantee: as `producer.environments.agents` and `producer.environments.atropos`. Reward functions of the run see what agents
sampled, as they would without them; a lease for which no group of Atropos came in time goes back to the trainer.
"""

import asyncio
import time
from dataclasses import dataclass

from producer.environments.agents import Agents
from producer.environments.atropos import Atropos
from producer.groups import Rollouts
from producer.interfaces import LeaseFailure
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease

_MARGIN = 0.05  # of a lease's time, for delivery


class AgentRollouts:
    """A `RolloutSource`, for a run with posted rewards."""

    def __init__(self, agents: Agents, access: EngineAccess, prompts: PromptFormat) -> None:
        self.reward_names = agents.reward_names
        self._agents = agents
        self._access = access
        self._prompts = prompts

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        began = time.monotonic()
        await self._access.wait_for(lease.policy_floor)
        progress.enter("with agents", "generation_failed")
        episodes, posted, generation_s = await self._agents.fulfil(lease, time.monotonic() - began)
        texts = self._prompts.decode(lease.prompt, [episode.token_ids for episode in episodes])
        return Rollouts(episodes, generation_s, texts, posted)


@dataclass
class AtroposRollouts:
    """A `RolloutSource`, for a run with `environment.atropos`. `reward_names` are the scores that are posted."""

    atropos: Atropos
    access: EngineAccess
    reward_names: tuple[str, ...]

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        if lease.sampling != self.atropos.sampling:
            raise LeaseFailure(
                "generation_failed", "trainer and producer have different `sampling:`; give both one file"
            )
        try:
            async with asyncio.timeout(lease.timeout_s * (1 - _MARGIN)):
                await self.access.wait_for(lease.policy_floor)
                progress.enter("with agents", "generation_failed")
                return await self.atropos.fulfil(lease.policy_floor)
        except TimeoutError:
            raise LeaseFailure("returned", "no environment posted a group") from None
