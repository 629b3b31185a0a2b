"""Rollouts of a single turn, those that outside agents generate through the endpoint and score, and those that environments of
Atropos post.

Guarantee: as `producer.endpoint.agents` and `producer.plugins.atropos.atropos`. Reward functions of the run see what agents
sampled, as they would without them; a lease for which no group of Atropos came in time goes back to the trainer.
"""

import asyncio
import time
from dataclasses import dataclass

from producer.endpoint.agents import Agents
from producer.engine_contract import Completion
from producer.groups import Episode, LeaseFailure, Rollouts
from producer.plugins.atropos.atropos import Atropos
from producer.rollouts.admission import EngineAccess, Progress
from producer.rollouts.prompts import PromptFormat
from protocol.wire.messages import Lease

_MARGIN = 0.05  # of a lease's time, for delivery


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
    """A `RolloutSource`, for a run with posted rewards."""

    agents: Agents
    access: EngineAccess
    prompts: PromptFormat

    def __post_init__(self) -> None:
        self.reward_names = self.agents.reward_names

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        began = time.monotonic()
        await self.access.wait_for(lease.policy_floor)
        progress.enter("with agents", "generation_failed")
        episodes, posted, generation_s = await self.agents.fulfil(lease, time.monotonic() - began)
        token_ids = [episode.token_ids for episode in episodes]
        texts = await self.prompts.in_thread(self.prompts.decode, lease.prompt, token_ids)
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
