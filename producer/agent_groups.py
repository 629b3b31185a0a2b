"""From a lease to a group by way of an outside agent.

Guarantee: as `producer.agents`; the run's other rewards score what was sampled, as they would without an agent.
"""

from collections.abc import Callable

import numpy as np

from producer.adapters import AdapterRegistry
from producer.agents import Agents
from producer.interfaces import Counters
from producer.metrics import ProducerMetrics
from producer.prompts import PromptFormat
from producer.rewards import RewardPool
from producer.rollouts import Episode, group_message
from protocol.config_rewards import RewardsSection
from protocol.messages import Group, Lease


class AgentGroups:
    """Takes the place of the producer's own generation in a run with posted rewards."""

    def __init__(
        self,
        section: RewardsSection,
        agents: Agents,
        adapters: AdapterRegistry,
        prompts: PromptFormat,
        rewards: RewardPool,
        counters: Counters,
        metrics: ProducerMetrics,
    ) -> None:
        self._is_posted = np.array([function.posted is not None for function in section.functions])
        self._agents = agents
        self._adapters = adapters
        self._prompts = prompts
        self._rewards = rewards
        self._counters = counters
        self._metrics = metrics

    async def group(self, lease: Lease, offered: Callable[[], None]) -> Group:
        """
        Args:
            offered: called when agents may take it.

        Raises:
            LeaseFailure: no agent did it, or not all of it.
        """
        await self._adapters.wait_for(lease.policy_floor)
        offered()
        episodes, posted, generation_s = await self._agents.fulfil(lease)
        token_ids = [episode.token_ids for episode in episodes]
        computed, reward_s = await self._rewards.score(
            lease.prompt, self._prompts.decode(lease.prompt, token_ids), token_ids, lease.columns
        )
        rewards = np.empty((len(episodes), len(self._is_posted)), np.float32)
        rewards[:, self._is_posted], rewards[:, ~self._is_posted] = posted, computed
        limit = lease.sampling.max_completion_length
        message = group_message(lease.lease_id, episodes, rewards, limit, generation_s, reward_s)
        self._count(episodes)
        self._metrics.generation_s.observe(generation_s)
        self._metrics.reward_s.observe(reward_s)
        return message

    def _count(self, episodes: list[Episode]) -> None:
        self._counters.groups += 1
        self._counters.completions += len(episodes)
        self._counters.truncated += sum(episode.truncated for episode in episodes)
        self._counters.tokens += sum(episode.num_sampled for episode in episodes)
        self._counters.prompt_tokens += episodes[0].prompt_length
