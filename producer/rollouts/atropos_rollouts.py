"""Rollouts that environments of Atropos post.

Guarantee: as `producer.environments.atropos`; a lease for which no group came in time goes back to the trainer.
"""

import asyncio

from producer.environments.atropos import Atropos
from producer.groups import Rollouts
from producer.interfaces import LeaseFailure
from producer.rollouts.engine_access import PolicyGate
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease

_MARGIN = 0.05  # of a lease's time, for delivery


class AtroposRollouts:
    """A `RolloutSource`, for a run with `environment.atropos`.

    Args:
        reward_names: the scores that are posted.
    """

    def __init__(self, atropos: Atropos, gate: PolicyGate, reward_names: tuple[str, ...]) -> None:
        self.reward_names = reward_names
        self._atropos = atropos
        self._gate = gate

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        if lease.sampling != self._atropos.sampling:
            raise LeaseFailure(
                "generation_failed", "trainer and producer have different `sampling:`; give both one file"
            )
        try:
            async with asyncio.timeout(lease.timeout_s * (1 - _MARGIN)):
                await self._gate.wait_for(lease.policy_floor)
                progress.enter("with agents", "generation_failed")
                return await self._atropos.fulfil(lease.policy_floor)
        except TimeoutError:
            raise LeaseFailure("returned", "no environment posted a group") from None
