"""Answers leases, each once and in time.

Guarantee: every lease that is not abandoned is answered exactly once, with a group or with the reason why not, before its
deadline, also when its trainer is replaced by another process of the run meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from producer.groups import LeaseFailure, Rollouts
from producer.metrics import Counters, Workload
from producer.rollouts.engine_access import Progress
from producer.rollouts.group import GroupBuilder
from producer.rollouts.in_flight import BusyClock
from protocol.runtime.logs import Throttle
from protocol.wire.messages import FailureReason, Group, Lease, Nack

logger = logging.getLogger(__name__)


class RolloutSource(Protocol):
    """Source of the completions of leases. `reward_names` come with them; reward functions compute the others."""

    reward_names: tuple[str, ...]

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        """Raise LeaseFailure if there are none, EngineError if the engine is dead."""
        ...


@dataclass
class Generation:
    """Works on leases, one task each. The exception of what is spawned ends the daemon; `answer` delivers a group or a
    refusal."""

    source: RolloutSource
    builder: GroupBuilder
    clock: BusyClock
    counters: Counters
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    answer: Callable[[Group | Nack], None]
    _works: dict[str, Progress] = field(default_factory=dict)
    _has_ended: bool = False
    _warn: Throttle = field(default_factory=partial(Throttle, logger))

    def start(self, lease: Lease) -> None:
        if self._has_ended:
            return  # the trainer takes it back at the goodbye
        work = self._works[lease.lease_id] = Progress(lease)
        work.task = self.spawn(self._fulfil(work))

    def abandon(self, lease_id: str) -> None:
        """Stop work on a lease without an answer."""
        work = self._works.pop(lease_id, None)
        if work is not None and work.task is not None:
            work.task.cancel()

    def abandon_all(self) -> None:
        for lease_id in list(self._works):
            self.abandon(lease_id)

    def hand_back_all(self) -> None:
        """Hand all leases back at the end; no lease begins any more."""
        self._has_ended = True
        for lease_id in list(self._works):
            self._hand_back(lease_id)

    def hand_back_ungenerated(self) -> None:
        """Return the leases whose completions are not there yet."""
        for lease_id, work in list(self._works.items()):
            if work.stage != "scoring":
                self._hand_back(lease_id)

    def hand_back_above(self, newest: int) -> None:
        """Return the leases that wait for a policy newer than `newest`, which may never come."""
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
        self.answer(Nack(lease_id, "returned"))

    async def _fulfil(self, work: Progress) -> None:
        lease = work.lease
        answer: Group | Nack
        try:
            async with asyncio.timeout(lease.timeout_s) as limit:
                rollouts = await self.source.generate(lease, work)
                answer = await self.builder.group(lease, rollouts, work)
        except LeaseFailure as failure:
            answer = self._refusal(lease, failure.reason, failure.detail)
        except TimeoutError as error:
            while_ = f"while {work.stage}{work.waits_for}"
            if not limit.expired():
                answer = self._refusal(
                    lease, work.reason, f"something timed out {while_}: {error or 'it did not say what'}"
                )
            else:
                self.counters.timed_out += 1
                detail = f"not done within the lease's {lease.timeout_s:g} s, {while_}"
                fix = "raise pipeline.lease_timeout_s if that is too short"
                answer = self._refusal(lease, work.reason, f"{detail}; {fix}")
        if self._works.get(lease.lease_id) is work:
            del self._works[lease.lease_id]
            self.answer(answer)

    def _refusal(self, lease: Lease, reason: FailureReason, detail: str) -> Nack:
        if reason == "returned":
            return Nack(lease.lease_id, "returned")
        self.counters.failed += 1
        self._warn(reason, f"prompt {lease.prompt_id} failed ({reason}): {detail}")
        return Nack(lease.lease_id, reason, detail[:65_536])
