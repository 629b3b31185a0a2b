"""From a lease to a group by way of an environment of Atropos.

Guarantee: as `producer.environments.atropos`; a lease for which no group came in time goes back to the trainer.
"""

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np

from producer.environments.atropos import Atropos
from producer.interfaces import Counters, LeaseFailure
from producer.metrics import ProducerMetrics
from producer.policies.registry import AdapterRegistry
from protocol.wire.messages import Group, Lease

_MARGIN = 0.05  # of a lease's time, for delivery


class AtroposGroups:
    """Takes the place of the producer's own generation in a run with `environment.atropos`."""

    def __init__(
        self, atropos: Atropos, adapters: AdapterRegistry, counters: Counters, metrics: ProducerMetrics
    ) -> None:
        self._atropos = atropos
        self._adapters = adapters
        self._counters = counters
        self._metrics = metrics

    async def group(self, lease: Lease, offered: Callable[[], None]) -> Group:
        """
        Args:
            offered: called when a group may take it.

        Raises:
            LeaseFailure: none came, or the trainer samples otherwise than this producer.
        """
        if lease.sampling != self._atropos.sampling:
            raise LeaseFailure(
                "generation_failed", "trainer and producer have different `sampling:`; give both one file"
            )
        try:
            async with asyncio.timeout(lease.timeout_s * (1 - _MARGIN)):
                await self._adapters.wait_for(lease.policy_floor)
                offered()
                group = await self._atropos.fulfil(lease.policy_floor)
        except TimeoutError:
            raise LeaseFailure("returned", "no environment posted a group") from None
        self._count(group)
        return msgspec.structs.replace(group, lease_id=lease.lease_id)

    def _count(self, group: Group) -> None:
        lengths = _sampled_lengths(group)
        self._counters.groups += 1
        self._counters.completions += len(lengths)
        self._counters.truncated += sum(group.truncated)
        self._counters.tokens += sum(lengths)
        self._counters.prompt_tokens += len(group.prompt_ids) // 4
        self._metrics.generation_s.observe(group.generation_s)
        self._metrics.generated(lengths)


def _sampled_lengths(group: Group) -> list[int]:
    """Of each completion, which is one sequence here, the tokens that were sampled."""
    lengths = np.frombuffer(group.completion_lengths, "<i4")
    if group.sampled:
        starts = np.cumsum(lengths) - lengths
        lengths = np.add.reduceat(np.frombuffer(group.sampled, "u1"), starts, dtype=np.int64)
    return [int(length) for length in lengths]
