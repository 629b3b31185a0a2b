"""From a lease to a group by way of an outside agent.

Guarantee: as `producer.environments.agents`; the run's other rewards score what was sampled, as they would without an agent.
"""

import logging
import time
from collections.abc import Callable

import numpy as np

from producer.environments.agents import Agents
from producer.groups import count, group_message
from producer.interfaces import Counters, LeaseFailure
from producer.metrics import ProducerMetrics
from producer.policies.registry import AdapterRegistry
from producer.rewards.pool import RewardPool
from producer.rollouts.prompts import PromptFormat
from protocol.config.rewards import RewardsSection
from protocol.throttle import Throttle
from protocol.wire.messages import Group, Lease

logger = logging.getLogger(__name__)


class AgentGroups:
    """Takes the place of the producer's own generation in a run with posted rewards. What agents post for no function of
    `section` stands behind these."""

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
        columns = dict.fromkeys((*section.names, *agents.reward_names))
        self._is_posted = np.array([name in agents.reward_names for name in columns])
        self._warn = Throttle(logger)
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
        began = time.monotonic()
        await self._adapters.wait_for(lease.policy_floor)
        offered()
        episodes, posted, generation_s = await self._agents.fulfil(lease, time.monotonic() - began)
        token_ids = [episode.token_ids for episode in episodes]
        computed, reward_s = await self._rewards.score(
            lease.prompt, self._prompts.decode(lease.prompt, token_ids), token_ids, lease.columns
        )
        rewards = np.empty((len(episodes), len(self._is_posted)), np.float32)
        rewards[:, self._is_posted], rewards[:, ~self._is_posted] = posted, computed
        failures = [episode.failure for episode in episodes if episode.failure]
        if failures:
            self._counters.failed_episodes += len(failures)
            self._warn("episode", f"an episode of prompt {lease.prompt_id} failed: {failures[0]}")
            # As those of an environment beside the producer:
            rewards[[bool(episode.failure) for episode in episodes]] = np.nan
            if np.isnan(rewards).all():
                raise LeaseFailure("environment_failed", f"no episode could be scored: {failures[0]}")
        limit = lease.sampling.max_completion_length
        message = group_message(lease.lease_id, episodes, rewards, limit, generation_s, reward_s)
        self._counters.groups += 1
        count(episodes, self._counters)
        self._metrics.generation_s.observe(generation_s)
        self._metrics.generated(episode.num_sampled for episode in episodes)
        self._metrics.reward_s.observe(reward_s)
        return message
