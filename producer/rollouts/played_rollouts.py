"""Rollouts of several turns: every completion is an episode with an environment.

Guarantee: a group fails if an episode of it never began; otherwise it has all its episodes, also those that failed.
"""

import asyncio
import math
import time

import numpy as np

from producer.groups import Rollouts, no_rewards
from producer.interfaces import LeaseFailure
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.episodes import EpisodePlayer
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease
from protocol.wire.prompts import is_conversational


class PlayedRollouts:
    """A `RolloutSource`, for a run with `environment.factory`.

    Args:
        reward_names: what the environment's own reward is called, if it has one.
    """

    def __init__(self, access: EngineAccess, player: EpisodePlayer, reward_names: tuple[str, ...]) -> None:
        self.reward_names = reward_names
        self._access = access
        self._player = player

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        if not is_conversational(lease.prompt):
            raise LeaseFailure(
                "bad_prompt",
                "an environment needs a list of messages such as {'role': 'user', 'content': '...'}, got "
                f"{type(lease.prompt).__name__}: {str(lease.prompt)[:80]}",
            )
        try:
            async with self._access.enter(lease, progress) as sample:
                started = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    plays = [self._player.play(lease, sample) for _ in range(lease.sampling.num_generations)]
                    tasks = [group.create_task(play) for play in plays]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        generation_s = time.monotonic() - started
        episodes = [task.result() for task in tasks]
        own = no_rewards(len(episodes))
        if self.reward_names:
            own = np.array([[math.nan if each.reward is None else each.reward] for each in episodes], np.float32)
        return Rollouts(episodes, generation_s, [episode.messages for episode in episodes], own)
