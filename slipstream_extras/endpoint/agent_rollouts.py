"""Rollouts that outside agents generate through the endpoint and score.

Guarantee: the same as of `slipstream_extras.endpoint.agents`. Reward functions of the run see the completions of agents as they
would see others.
"""

import time
from dataclasses import dataclass

from producer.groups import Rollouts
from producer.rollouts.engine_access import EngineAccess, Progress
from producer.rollouts.prompts import PromptFormat
from protocol.wire.messages import Lease
from slipstream_extras.endpoint.agents import Agents


@dataclass
class AgentRollouts:
    """A `RolloutSource`, for rows that agents answer. `reward_names` are those that they post."""

    agents: Agents
    access: EngineAccess
    prompts: PromptFormat
    reward_names: tuple[str, ...]
    environment: str = ""

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        began = time.monotonic()
        await self.access.wait_for(lease.policy_floor)
        progress.enter("with agents", "generation_failed")
        episodes, posted, generation_s = await self.agents.fulfil(lease, time.monotonic() - began, self.environment)
        token_ids = [episode.token_ids for episode in episodes]
        texts = await self.prompts.in_thread(self.prompts.decode, lease.prompt, token_ids)
        return Rollouts(episodes, generation_s, texts, posted)
