"""From a lease to a scored group.

Guarantee: every lease that is not abandoned is answered exactly once, with a group or with the reason why not, before its
deadline, also when its trainer is replaced by another process of the run meanwhile; no more groups are in the engine at once
than keep it busy, so that each begins on the newest policy there is when its turn comes; none enters while paused. What becomes
of it when a newer one arrives is in `producer.rollouts.in_flight`. A lease of an evaluation is answered by the version that it
names, or not at all.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from producer.groups import Episode, count, group_message
from producer.interfaces import Adapter, Counters, LeaseFailure, Workload
from producer.metrics import ProducerMetrics
from producer.policies.registry import AdapterRegistry
from producer.rewards.pool import RewardPool
from producer.rollouts.admission import Admission
from producer.rollouts.agent_groups import AgentGroups
from producer.rollouts.atropos_groups import AtroposGroups
from producer.rollouts.episodes import Episodes
from producer.rollouts.in_flight import InFlight
from producer.rollouts.prompts import PromptFormat
from protocol.throttle import Throttle
from protocol.wire.messages import FailureReason, Group, Lease, Nack

logger = logging.getLogger(__name__)


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
    """Works on leases, one task each. `clock` tells how long the engine had something to do; whoever else has requests in it
    runs it, too.

    Args:
        places: of groups in the engine.
        group_size: completions of a group for training.
        spawn: starts a task whose exceptions end the daemon.
        answer: delivers a group or a refusal.
        agents: generate instead, in a run with posted rewards, or with environments of Atropos.
        episodes: are played instead, in a run with an environment.
    """

    def __init__(
        self,
        in_flight: InFlight,
        adapters: AdapterRegistry,
        prompts: PromptFormat,
        rewards: RewardPool,
        counters: Counters,
        metrics: ProducerMetrics,
        places: Admission,
        group_size: int,
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        answer: Callable[[Group | Nack], None],
        agents: AgentGroups | AtroposGroups | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self._in_flight = in_flight
        self._adapters = adapters
        self._prompts = prompts
        self._rewards = rewards
        self._counters = counters
        self._metrics = metrics
        self._places = places
        self._group_size = group_size
        self._spawn = spawn
        self._answer = answer
        self._agents = agents
        self._episodes = episodes
        self._open = asyncio.Event()
        self._open.set()
        self._works: dict[str, _Work] = {}
        self._has_ended = False
        self._warn = Throttle(logger)
        self.clock = BusyClock()

    def start(self, lease: Lease) -> None:
        if self._has_ended:
            return  # the trainer takes it back at the goodbye
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
        """At the end: no lease is begun any more."""
        self._has_ended = True
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
            stages.count("generating") + stages.count("with agents"),
            stages.count("scoring"),
            self.clock.busy_s(),
            stages.count("with agents"),
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
            returned = failure.reason == "returned"
            answer = (
                Nack(lease.lease_id, "returned") if returned else self._refusal(lease, failure.reason, failure.detail)
            )
        except TimeoutError:
            self._counters.timed_out += 1
            detail = f"not done within the lease's {lease.timeout_s:g} s, while {work.stage}{work.waits_for}"
            answer = self._refusal(lease, work.reason, f"{detail}; raise pipeline.lease_timeout_s if that is too short")
        if self._works.get(lease.lease_id) is work:
            del self._works[lease.lease_id]
            self._answer(answer)

    async def _group(self, work: "_Work") -> Group:
        lease = work.lease
        if self._agents is not None:
            await self._open.wait()
            return await self._agents.group(lease, lambda: work.enter("with agents", "generation_failed"))
        if self._episodes is not None:
            return await self._group_of_episodes(work, self._episodes)
        prompt_ids = self._prompts.encode(lease.prompt, lease.sampling.max_completion_length)
        async with self._place(work) as adapter:
            started = time.monotonic()
            with self.clock.running():
                if adapter is None:
                    completions = await self._in_flight.sample(prompt_ids, lease.sampling)
                else:
                    completions = await self._in_flight.sample_on(prompt_ids, lease.sampling, adapter)
        generation_s = time.monotonic() - started
        episodes = [Episode.of(prompt_ids, completion) for completion in completions]
        self._note_generated(work, episodes, generation_s)
        token_ids = [completion.token_ids for completion in completions]
        rewards, reward_s = await self._rewards.score(
            lease.prompt, self._prompts.decode(lease.prompt, token_ids), token_ids, lease.columns
        )
        return self._message(lease, episodes, rewards, generation_s, reward_s)

    async def _group_of_episodes(self, work: "_Work", source: Episodes) -> Group:
        lease = work.lease
        source.check(lease)
        async with self._place(work) as adapter:
            started = time.monotonic()
            episodes = await source.play(lease, adapter, self.clock.running)
        generation_s = time.monotonic() - started
        self._note_generated(work, episodes, generation_s)
        rewards, reward_s = np.zeros((len(episodes), 0), np.float32), 0.0
        if source.needs_functions:
            rewards, reward_s = await self._rewards.score(
                lease.prompt,
                [episode.messages for episode in episodes],
                [episode.token_ids for episode in episodes],
                lease.columns,
            )
        return self._message(lease, episodes, source.with_own_rewards(rewards, episodes), generation_s, reward_s)

    def _note_generated(self, work: "_Work", episodes: list[Episode], generation_s: float) -> None:
        evaluates = work.lease.evaluates
        if evaluates is not None and set().union(*(episode.versions for episode in episodes)) - {evaluates.version}:
            raise LeaseFailure("no_policy", f"v{evaluates.version} is evaluated, and newer weights came in between")
        count(episodes, self._counters)
        self._metrics.generation_s.observe(generation_s)
        self._metrics.generated(episode.num_sampled for episode in episodes)
        work.enter("scoring", "reward_failed")

    def _message(
        self,
        lease: Lease,
        episodes: list[Episode],
        rewards: NDArray[np.float32],
        generation_s: float,
        reward_s: float,
    ) -> Group:
        message = group_message(
            lease.lease_id, episodes, rewards, lease.sampling.max_completion_length, generation_s, reward_s
        )
        self._counters.groups += 1
        self._metrics.reward_s.observe(reward_s)
        return message

    @asynccontextmanager
    async def _place(self, work: "_Work") -> AsyncIterator[Adapter | None]:
        """Room in the engine while nothing is paused. An evaluation waits behind what is for training, and gets the version that
        it evaluates; anything else gets None, and takes the newest."""
        lease = work.lease
        if lease.evaluates is not None:
            async with self._adapters.pin_evaluated(lease.evaluates) as adapter:
                work.enter("waiting", "generation_failed", " for room that training leaves in the engine")
                async with self._places.behind(max(1, self._group_size // lease.sampling.num_generations)):
                    await self._open.wait()
                    work.enter("generating", "generation_failed")
                    yield adapter
            return
        await self._adapters.wait_for(lease.policy_floor)
        work.enter("waiting", "generation_failed", " for room in the engine")
        async with self._places:
            await self._adapters.wait_for(lease.policy_floor)
            while not self._open.is_set():
                await self._open.wait()
                await self._adapters.wait_for(lease.policy_floor)
            work.enter("generating", "generation_failed")
            yield None

    def _refusal(self, lease: Lease, reason: FailureReason, detail: str) -> Nack:
        self._counters.failed += 1
        self._warn(reason, f"prompt {lease.prompt_id} failed ({reason}): {detail}")
        return Nack(lease.lease_id, reason, detail[:65_536])


class _Work:
    """One lease and where it is, for the heartbeat and for the message when its deadline passes."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.enter("waiting", "no_policy", f" for policy v{lease.policy_floor}")

    def enter(
        self,
        stage: Literal["waiting", "generating", "with agents", "scoring"],
        reason: FailureReason,
        waits_for: str = "",
    ) -> None:
        self.stage, self.reason, self.waits_for = stage, reason, waits_for
