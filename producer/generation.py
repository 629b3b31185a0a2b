"""From a lease to a scored group.

Guarantee: every lease that is not abandoned is answered exactly once, with a group or with the reason why not, before its
deadline, also when its trainer is replaced by another process of the run meanwhile; no more groups are in the engine at
once than keep it busy, so that each is sampled on the newest policy there is when its turn comes; none enters while paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from producer.adapters import AdapterRegistry
from producer.interfaces import Completion, Counters, GenerationEngine, LeaseFailure, Workload
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
        self._open = asyncio.Event()
        self._open.set()
        self._works: dict[str, _Work] = {}
        self._warned_at: dict[str, float] = {}
        self._clock = BusyClock()

    def start(self, lease: Lease) -> None:
        work = self._works[lease.lease_id] = _Work(lease)
        work.task = self._spawn(self._fulfil(work))

    def pause(self, paused: bool) -> None:
        """While paused nothing enters the engine; what is in it goes on."""
        if paused:
            self._open.clear()
        else:
            self._open.set()

    def abandon(self, lease_id: str) -> None:
        """Stops work on a lease without an answer."""
        work = self._works.pop(lease_id, None)
        if work is not None and work.task is not None:
            work.task.cancel()

    def abandon_all(self) -> None:
        for lease_id in list(self._works):
            self.abandon(lease_id)

    def hand_back_all(self) -> None:
        for lease_id in list(self._works):
            self._hand_back(lease_id)

    def hand_back_above(self, newest: int) -> None:
        """Returns the leases that wait for a policy newer than `newest`, which may never come."""
        for lease_id, work in list(self._works.items()):
            if work.stage == "waiting" and work.lease.policy_floor > newest:
                self._hand_back(lease_id)

    def workload(self) -> Workload:
        """May be called from any thread."""
        works = list(self._works.values())
        stages = [work.stage for work in works]
        return Workload(
            tuple(work.lease.policy_floor for work in works if work.stage == "waiting"),
            stages.count("generating"),
            stages.count("scoring"),
            self._clock.busy_s(),
        )

    def _hand_back(self, lease_id: str) -> None:
        self.abandon(lease_id)
        self._answer(Nack(lease_id, "returned"))

    async def _fulfil(self, work: "_Work") -> None:
        lease = work.lease
        answer: Group | Nack
        try:
            async with asyncio.timeout(lease.timeout_s):
                answer = await self._group(work)
        except LeaseFailure as failure:
            answer = self._refusal(lease, failure.reason, failure.detail)
        except TimeoutError:
            self._counters.timed_out += 1
            detail = f"not done within the lease's {lease.timeout_s:g} s, while {work.stage}{work.waits_for}"
            answer = self._refusal(lease, work.reason, f"{detail}; raise pipeline.lease_timeout_s if that is too short")
        if self._works.get(lease.lease_id) is work:
            del self._works[lease.lease_id]
            self._answer(answer)

    async def _group(self, work: "_Work") -> Group:
        lease = work.lease
        prompt_ids = self._prompts.encode(lease.prompt, lease.sampling.max_completion_length)
        await self._adapters.wait_for(lease.policy_floor)
        work.enter("waiting", "generation_failed", " for room in the engine")
        async with self._places:
            await self._adapters.wait_for(lease.policy_floor)
            while not self._open.is_set():
                await self._open.wait()
                await self._adapters.wait_for(lease.policy_floor)
            started = time.monotonic()
            async with self._adapters.pin() as adapter:
                work.enter("generating", "generation_failed")
                with self._clock.running():
                    completions = await self._engine.generate(prompt_ids, lease.sampling, adapter)
        generation_s = time.monotonic() - started
        self._counters.tokens += sum(len(completion.token_ids) for completion in completions)
        work.enter("scoring", "reward_failed")
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


class _Work:
    """One lease and where it is, for the heartbeat and for the message when its deadline passes."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.enter("waiting", "no_policy", f" for policy v{lease.policy_floor}")

    def enter(
        self, stage: Literal["waiting", "generating", "scoring"], reason: FailureReason, waits_for: str = ""
    ) -> None:
        self.stage, self.reason, self.waits_for = stage, reason, waits_for


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
