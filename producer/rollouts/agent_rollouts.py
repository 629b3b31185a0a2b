"""Rollouts that outside agents generate through the endpoint and score.

Guarantee: as `producer.environments.agents`; reward functions of the run see what was sampled, as they would without an agent.
"""

import time

from producer.environments.agents import Agents
from producer.groups import Rollouts
from producer.rollouts.engine_access import PolicyGate
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease


class AgentRollouts:
    """A `RolloutSource`, for a run with posted rewards."""

    def __init__(self, agents: Agents, gate: PolicyGate, prompts: PromptFormat) -> None:
        self.reward_names = agents.reward_names
        self._agents = agents
        self._gate = gate
        self._prompts = prompts

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        began = time.monotonic()
        await self._gate.wait_for(lease.policy_floor)
        progress.enter("with agents", "generation_failed")
        episodes, posted, generation_s = await self._agents.fulfil(lease, time.monotonic() - began)
        texts = self._prompts.decode(lease.prompt, [episode.token_ids for episode in episodes])
        return Rollouts(episodes, generation_s, texts, posted)
