"""A registry of policies around any weights, and one without, as tests need them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from producer.engine_contract import Adapter, PolicyWeights
from producer.metrics import Counters, ProducerMetrics
from producer.policies.loader import PolicyLoader
from producer.policies.probe import ReceivedProbe, SwapProof
from producer.policies.registry import AdapterRegistry, SwapReport
from protocol.wire import adapter_blob


class Policies:
    """A registry without weights or loading."""

    def __init__(self) -> None:
        self.current: Adapter | None = None
        self.pins: Counter[int] = Counter()  # by version
        self._swapped = asyncio.Event()

    def swap(self, version: int | None) -> None:
        """Makes this one current; or none, as when another trainer comes."""
        self.current = None if version is None else Adapter(version, f"v{version}", version, Path("unused"))
        self._swapped.set()
        self._swapped = asyncio.Event()

    @contextmanager
    def pin(self, adapter: Adapter | None = None, outdated: Any = None) -> Iterator[Adapter]:
        adapter = adapter or self.current
        assert adapter is not None
        self.pins[adapter.version] += 1
        try:
            yield adapter
        finally:
            self.pins[adapter.version] -= 1

    async def wait_for(self, floor: int) -> None:
        while self.current is None or self.current.version < floor:
            await self._swapped.wait()

    def loaded(self, version: int) -> Adapter | None:
        """The current one is the only one that is surely there."""
        return self.current if self.current is not None and self.current.version == version else None

    def has_newer(self, adapter: Adapter) -> bool:
        return self.current is not None and self.current.version > adapter.version

    def pinned(self) -> set[int]:
        return {version for version, count in self.pins.items() if count}


def received_probe(row: Sequence[int], base: Sequence[float], policy: Sequence[float] | None) -> ReceivedProbe:
    """One row of tokens, with the log-probs of each but the first."""
    return ReceivedProbe((tuple(row),), np.array(base), None, None if policy is None else np.array(policy), None)


def registry_of(
    weights: PolicyWeights,
    folder: Path,
    counters: Counters | None = None,
    tolerance: float = 1e-3,
    metrics: ProducerMetrics | None = None,
    record: Callable[..., None] = lambda event, **fields: None,
    unpack: Callable[..., int] = adapter_blob.unpack,
    **options: Any,
) -> AdapterRegistry:
    """It unpacks policies in `folder`/adapters.

    Args:
        tolerance: in nats.
        record: writes a line of the timeline.
        options: of the registry.
    """
    loader = PolicyLoader(weights, lambda num_bytes: folder / "adapters", SwapProof(tolerance), unpack=unpack)
    metrics = metrics or ProducerMetrics(CollectorRegistry())
    report = SwapReport(counters or Counters(), metrics, record)
    return AdapterRegistry(loader, report, **options)
