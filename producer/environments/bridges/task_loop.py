"""Takes tasks from a producer and has their episodes played, several at once.

Guarantee: every episode of a task ends with its rewards or with the reason why it has none, unless its task is over before that.
An exception of an environment fails its episode and nothing else.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from producer.environments.bridges.policy_endpoint import PolicyEndpoint, RefusedByProducerError, TaskOverError

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0
_LONGEST_REASON = 1000  # characters


class Player(Protocol):
    """Plays the episodes of tasks."""

    async def play(self, task: dict[str, Any], episode: str) -> Mapping[str, Any]:
        """Plays one and returns rewards by name; those that the task asks for are posted."""

    async def problem(self) -> str:
        """Why no episode can be played now, or nothing."""


class TaskLoop:
    """See the module's guarantee.

    Args:
        max_concurrent: episodes at once.
    """

    def __init__(self, endpoint: PolicyEndpoint, player: Player, max_concurrent: int, episode_timeout_s: float) -> None:
        self._endpoint = endpoint
        self._player = player
        self._slots = asyncio.Semaphore(max_concurrent)
        self._episode_timeout_s = episode_timeout_s
        self._named: set[str] = set()

    async def run(self) -> None:
        """Plays until it is cancelled."""
        async with asyncio.TaskGroup() as playing:
            while True:
                async with self._slots:  # there is room for an episode
                    pass
                if problem := await self._player.problem():
                    logger.warning("%s; looking again in %g s", problem, _PAUSE_S)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                try:
                    task = await self._endpoint.take()
                except RefusedByProducerError as error:
                    logger.warning("no task: %s", error)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if task is not None:
                    ends_at = asyncio.get_running_loop().time() + task["expires_in_s"]
                    for episode in task["episodes"]:
                        playing.create_task(self._episode(task, episode, ends_at))

    async def _episode(self, task: dict[str, Any], episode: str, ends_at: float) -> None:
        async with self._slots:
            try:
                await self._end(episode, *await self._played(task, episode, ends_at))
            except TaskOverError:
                logger.info("episode %s: its task is over", episode)
            except RefusedByProducerError as error:
                logger.warning("episode %s: %s", episode, error)

    async def _played(self, task: dict[str, Any], episode: str, ends_at: float) -> tuple[dict[str, Any], str]:
        """Returns the episode's rewards, or why there are none."""
        left_s = ends_at - asyncio.get_running_loop().time()
        limit_s = min(self._episode_timeout_s, left_s)
        if limit_s <= 0:
            raise TaskOverError
        try:
            async with asyncio.timeout(limit_s) as limit:
                found = await self._player.play(task, episode)
        except TimeoutError as error:
            if not limit.expired():
                return {}, _described(error)
            return {}, f"it was not over within environment.episode_timeout_s={self._episode_timeout_s:g} seconds"
        except Exception as error:
            logger.debug("episode %s", episode, exc_info=True)
            return {}, _described(error)
        for name in set(task["rewards"]) - found.keys() - self._named:
            self._named.add(name)
            logger.warning("reward %s is missing: there are %s", name, ", ".join(sorted(found)) or "none")
        return {name: found.get(name) for name in task["rewards"]}, ""

    async def _end(self, episode: str, rewards: dict[str, Any], failure: str) -> None:
        if not failure:
            try:
                await self._endpoint.reward(episode, rewards)
                return
            except RefusedByProducerError as error:
                failure = str(error)  # such as: nothing was sampled
        logger.warning("episode %s failed: %s", episode, failure)
        await self._endpoint.fail(episode, failure)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
