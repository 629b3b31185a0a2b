"""Where rollouts come from, and how far a lease is.

Guarantee: whoever generates for leases needs to know nothing else of them than this.
"""

import asyncio
from typing import Literal, Protocol

from producer.groups import Rollouts
from protocol.wire.messages import FailureReason, Lease

Stage = Literal["waiting", "generating", "with agents", "scoring"]


class Progress:
    """How far a lease is, for the heartbeat and for the message when its deadline passes."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.enter("waiting", "no_policy", f" for policy v{lease.policy_floor}")

    def enter(self, stage: Stage, reason: FailureReason, waits_for: str = "") -> None:
        """The lease fails for this reason if its deadline passes now."""
        self.stage, self.reason, self.waits_for = stage, reason, waits_for


class RolloutSource(Protocol):
    """Generates the completions of leases. `PlainRollouts`, `PlayedRollouts`, `AgentRollouts` and `AtroposRollouts` are some."""

    reward_names: tuple[str, ...]
    """Rewards that come with the rollouts; reward functions compute the others."""

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        """Raises LeaseFailure if there are none, EngineError if the engine is dead."""
        ...
