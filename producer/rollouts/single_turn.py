"""Rollouts of a single turn, and those that outside agents generate through the endpoint and score.

Guarantee: the same as of `producer.endpoint.agents`. Reward functions of the run see the completions of agents as they would see
others.
"""

import time
from dataclasses import dataclass

from producer.endpoint.agents import Agents
from producer.engine_contract import Completion
from producer.groups import Episode, Rollouts
from producer.rollouts.engine_access import EngineAccess, Progress
from producer.rollouts.prompts import PromptFormat
from protocol.wire.messages import Lease


@dataclass
class PlainRollouts:
    """A `RolloutSource`: one completion after the other for one prompt, as many as the lease asks for, none longer."""

    access: EngineAccess
    prompts: PromptFormat
    reward_names: tuple[str, ...] = ()

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        prompts, longest = self.prompts, lease.sampling.max_completion_length
        prompt_ids = await prompts.in_thread(prompts.encode, lease.prompt, longest)
        async with self.access.enter(lease, progress) as sample:
            started = time.monotonic()
            completions = await sample(prompt_ids, lease.sampling)
        generation_s = time.monotonic() - started
        return await prompts.in_thread(self._rollouts, lease, prompt_ids, completions, generation_s)

    def _rollouts(
        self, lease: Lease, prompt_ids: list[int], completions: list[Completion], generation_s: float
    ) -> Rollouts:
        texts = self.prompts.decode(lease.prompt, [completion.token_ids for completion in completions])
        episodes = [Episode.of(prompt_ids, completion) for completion in completions]
        return Rollouts(episodes, generation_s, texts)


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
