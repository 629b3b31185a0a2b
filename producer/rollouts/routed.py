"""Rollouts of a run with several environments: each lease goes to the source of its row's environment.

Guarantee: what happens to a lease of one environment changes nothing for those of another. Rewards that come with the rollouts
have the same columns for all; those of other environments are missing, which is no failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from producer.groups import LeaseFailure, Rollouts
from producer.rollouts.engine_access import Progress
from producer.rollouts.leases import RolloutSource
from protocol.config.environments import COLUMN, environment_of
from protocol.wire.messages import Lease


@dataclass
class RoutedRollouts:
    """A `RolloutSource` of sources, by the names of their environments. `reward_names` has those of all."""

    sources: Mapping[str, RolloutSource]
    reward_names: tuple[str, ...]

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        name = environment_of(lease.columns)
        source = self.sources.get(name)
        if source is None:
            known = ", ".join(self.sources)
            raise LeaseFailure(
                "generation_failed", f"the row's {COLUMN} {name!r} is not one of this producer's: {known}"
            )
        rollouts = await source.generate(lease, progress)
        rewards = np.full((len(rollouts.episodes), len(self.reward_names)), np.nan, np.float32)
        for column, own in zip(source.reward_names, rollouts.own_rewards.T, strict=True):
            rewards[:, self.reward_names.index(column)] = own
        return replace(rollouts, own_rewards=rewards)
