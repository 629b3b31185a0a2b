"""From a lease to a scored group.

Guarantee: every lease that is not abandoned is answered exactly once, with a group or with the reason why not, before its
deadline; no more groups are in the engine at once than keep it busy, so that each is sampled on the newest policy there
is when its turn comes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.adapters import AdapterRegistry
from producer.interfaces import Completion, Counters, GenerationEngine, LeaseFailure
from producer.prompts import PromptFormat
from producer.rewards import RewardPool
from protocol.messages import FailureReason, Group, Lease, Nack

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 5.0


class BusyClock:
    """Time during which at least one request is in the engine."""

    def __init__(self) -> None:
        self._active = 0
        self._since = 0.0
        self._total_s = 0.0

    def busy_s(self) -> float:
        return self._total_s + (time.monotonic() - self._since if self._active else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._active == 0:
            self._since = time.monotonic()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._total_s += time.monotonic() - self._since


class Generation:
    """Works on leases, one task each.

    Args:
        max_groups: groups in the engine at once.
        spawn: starts a task whose exceptions end the daemon.
        answer: delivers a group or a refusal.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        adapters: AdapterRegistry,
        prompts: PromptFormat,
        rewards: RewardPool,
        counters: Counters,
        max_groups: int,
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        answer: Callable[[Group | Nack], None],
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._prompts = prompts
        self._rewards = rewards
        self._counters = counters
        self._places = asyncio.Semaphore(max_groups)
        self._spawn = spawn
        self._answer = answer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._warned_at: dict[str, float] = {}
        self.clock = BusyClock()

    def start(self, lease: Lease) -> None:
        self._tasks[lease.lease_id] = self._spawn(self._fulfil(lease))

    def abandon(self, lease_id: str) -> None:
        """Stops work on a lease without an answer."""
        task = self._tasks.pop(lease_id, None)
        if task is not None:
            task.cancel()

    def abandon_all(self) -> list[str]:
        """Stops all work and returns the leases that were not answered."""
        lease_ids = list(self._tasks)
        for lease_id in lease_ids:
            self.abandon(lease_id)
        return lease_ids

    async def _fulfil(self, lease: Lease) -> None:
        progress = _Progress()
        answer: Group | Nack
        try:
            async with asyncio.timeout(lease.timeout_s):
                answer = await self._group(lease, progress)
        except LeaseFailure as failure:
            answer = self._refusal(lease, failure.reason, failure.detail)
        except TimeoutError:
            detail = f"not done within the lease's {lease.timeout_s:g} s, while {progress.stage}"
            answer = self._refusal(
                lease, progress.reason, f"{detail}; raise pipeline.lease_timeout_s if that is too short"
            )
        if self._tasks.pop(lease.lease_id, None) is not None:
            self._answer(answer)

    async def _group(self, lease: Lease, progress: "_Progress") -> Group:
        prompt_ids = self._prompts.encode(lease.prompt, lease.sampling.max_completion_length)
        progress.enter(f"waiting for policy v{lease.policy_floor}", "no_policy")
        await self._adapters.wait_for(lease.policy_floor)
        progress.enter("generating", "generation_failed")
        async with self._places:
            await self._adapters.wait_for(lease.policy_floor)
            started = time.monotonic()
            async with self._adapters.pin() as adapter:
                with self.clock.running():
                    completions = await self._engine.generate(prompt_ids, lease.sampling, adapter)
        generation_s = time.monotonic() - started
        self._counters.tokens += sum(len(completion.token_ids) for completion in completions)
        progress.enter("scoring", "reward_failed")
        token_ids = [completion.token_ids for completion in completions]
        rewards, reward_s = await self._rewards.score(
            lease.prompt, self._prompts.decode(lease.prompt, token_ids), token_ids, lease.columns
        )
        self._counters.groups += 1
        return _group_message(lease.lease_id, adapter.version, prompt_ids, completions, rewards, generation_s, reward_s)

    def _refusal(self, lease: Lease, reason: FailureReason, detail: str) -> Nack:
        self._counters.failed += 1
        now = time.monotonic()
        text = f"prompt {lease.prompt_id} failed ({reason}): {detail}"
        if now - self._warned_at.get(reason, float("-inf")) >= _WARN_EVERY_S:
            self._warned_at[reason] = now
            logger.warning("%s", text)
        else:
            logger.debug("%s", text)
        return Nack(lease.lease_id, reason, detail[:65_536])


class _Progress:
    """What a lease is waiting for, for the message when its deadline passes."""

    def __init__(self) -> None:
        self.stage = "reading the prompt"
        self.reason: FailureReason = "bad_prompt"

    def enter(self, stage: str, reason: FailureReason) -> None:
        self.stage, self.reason = stage, reason


def _group_message(
    lease_id: str,
    policy_version: int,
    prompt_ids: list[int],
    completions: list[Completion],
    rewards: NDArray[np.float32],
    generation_s: float,
    reward_s: float,
) -> Group:
    token_ids = [token for completion in completions for token in completion.token_ids]
    logprobs = [logprob for completion in completions for logprob in completion.logprobs]
    return Group(
        lease_id=lease_id,
        policy_version=policy_version,
        prompt_ids=np.array(prompt_ids, "<i4").tobytes(),
        completion_lengths=np.array([len(completion.token_ids) for completion in completions], "<i4").tobytes(),
        completion_ids=np.array(token_ids, "<i4").tobytes(),
        logprobs=np.array(logprobs, "<f4").tobytes(),
        rewards=rewards.astype("<f4").tobytes(),
        truncated=np.array([completion.truncated for completion in completions], "u1").tobytes(),
        generation_s=generation_s,
        reward_s=reward_s,
    )
