"""Builds the group that the trainer gets from rollouts of any source.

Guarantee: generated tokens are counted once, also when scoring fails afterwards. An episode that failed has no reward. A group
without a single scored episode is refused.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from producer.groups import LeaseFailure, Rollouts, group_message
from producer.metrics import Counters, ProducerMetrics
from producer.rewards.pool import RewardFailures, RewardPool
from producer.rollouts.engine_access import Progress
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.self_teacher import Score
from protocol.runtime.logs import Throttle
from protocol.wire.messages import Group, Lease, Logged

logger = logging.getLogger(__name__)


class Teachers(Protocol):
    """Teachers that score groups beside rewards, as the entry point of the group `slipstream.teachers` offers them."""

    async def read_with(self, tokenizer: Any) -> None:
        """Check all teachers. Raise ConfigError if one that answers cannot teach."""
        ...

    def use_engine(self, prompts: PromptFormat, score: Score) -> None:
        """Let the policy teach itself where the configuration says so."""
        ...

    async def close(self) -> None: ...

    async def scores(self, lease: Lease, group: Group) -> dict[str, bytes]:
        """Return the fields of a group that a teacher's log-probs of its tokens fill. Raise LeaseFailure if there are none."""
        ...


@dataclass
class GroupBuilder:
    """Counts and scores rollouts and builds their message. It has all rewards in the order of `reward_names`; those in
    `included_rewards` come with the rollouts."""

    reward_names: tuple[str, ...]
    included_rewards: tuple[str, ...]
    rewards: RewardPool
    counters: Counters
    metrics: ProducerMetrics
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread
    teachers: Teachers | None = None
    is_given: bool = False  # whether rewards of spans are advantages
    _warn: Throttle = field(default_factory=partial(Throttle, logger))

    async def group(self, lease: Lease, rollouts: Rollouts, progress: Progress) -> Group:
        """Raise LeaseFailure if the rollouts cannot be scored, or do not fit together."""
        if lease.evaluates is not None and rollouts.versions - {lease.evaluates.version}:
            raise LeaseFailure(
                "no_policy", f"v{lease.evaluates.version} is evaluated, and newer weights came in between"
            )
        self._count(lease, rollouts)
        has_failed = [bool(episode.failure) for episode in rollouts.episodes]
        self._check_scored(rollouts, all(has_failed))
        progress.enter("scoring", "reward_failed")
        is_included, reward_s = np.array([name in self.included_rewards for name in self.reward_names], bool), 0.0
        failures, logged = RewardFailures(), Logged()
        rewards = np.empty((len(rollouts.episodes), len(is_included)), np.float32)
        rewards[:, is_included] = rollouts.own_rewards
        if not is_included.all():
            rewards[:, ~is_included], reward_s, failures, spans, logged = await self.rewards.score(
                lease.prompt,
                rollouts.completions,
                [episode.token_ids for episode in rollouts.episodes],
                lease.columns,
                number=lease.prompt_id,
                version=min(rollouts.versions, default=0),
            )
            for episode, found in zip(rollouts.episodes, spans, strict=False):  # empty if no function gave any
                episode.reward_spans(found)
        rewards[has_failed] = np.nan
        for number, episode in enumerate(rollouts.episodes):
            if episode.failure:
                failures.add("", "environment", episode.failure, [number])
                episode.forget_spans()
        self._check_scored(rollouts, any(has_failed) and bool(rewards.size) and bool(np.isnan(rewards).all()))
        limit = lease.sampling.max_completion_length
        message: Group = await self.in_thread(
            partial(group_message, is_given=self.is_given),
            lease.lease_id,
            rollouts.episodes,
            rewards,
            limit,
            rollouts.generation_s,
            reward_s,
            failures.entries(),
        )
        message = msgspec.structs.replace(message, logged=logged)
        if self.teachers is not None and lease.evaluates is None:
            progress.enter("scoring", "generation_failed")
            message = msgspec.structs.replace(message, **await self.teachers.scores(lease, message))
        self.counters.groups += 1
        self.metrics.reward_s.observe(reward_s)
        return message

    def _count(self, lease: Lease, rollouts: Rollouts) -> None:
        counters, episodes = self.counters, rollouts.episodes
        counters.prompt_tokens += episodes[0].prompt_length
        for episode in episodes:
            counters.tokens += episode.num_sampled
            self.metrics.lengths.observe(episode.num_sampled)
        counters.completions += len(episodes)
        counters.truncated += sum(episode.truncated for episode in episodes)
        self.metrics.generation_s.observe(rollouts.generation_s)
        failures = [episode.failure for episode in episodes if episode.failure]
        counters.failed_episodes += len(failures)
        if failures:
            self._warn("episode", f"an episode of prompt {lease.prompt_id} failed: {failures[0]}")

    def _check_scored(self, rollouts: Rollouts, is_hopeless: bool) -> None:
        if is_hopeless:
            failed = [episode for episode in rollouts.episodes if episode.failure]
            worst = max(failed, key=lambda episode: episode.is_outage)
            raise LeaseFailure(worst.failure_reason, f"no episode could be scored: {worst.failure}")
