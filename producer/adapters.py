"""The policy versions that the engine holds.

Guarantee: a request runs on the adapter it pinned to its end. Every load has a name, an id and a folder of its own; a
superseded version is unloaded, and its folder deleted after that, only when nothing pins it. A version that cannot be
loaded, or that the engine does not compute as the trainer does, changes nothing: the one before stays current. (vLLM dies
when it has to re-read an adapter whose folder is gone, and confuses two adapters of one name: docs/architecture.md, "The
swap".)
"""

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from producer.interfaces import Adapter, AdapterRefusedError, Arrival, Counters, GenerationEngine, Probe
from producer.metrics import ProducerMetrics
from producer.probe import SwapProof
from producer.timeline import Timeline
from protocol import logs
from protocol.adapter_blob import BlobError, unpack
from protocol.messages import PolicyInfo

logger = logging.getLogger(__name__)

_MAX_REASON = 500  # characters of it that the trainer is told


class AdapterRegistry:
    """Which adapter new requests start on, and which old ones are still needed.

    Args:
        folder_for: where an adapter of so many bytes is unpacked; ours alone.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        folder_for: Callable[[int], Path],
        proof: SwapProof,
        counters: Counters,
        metrics: ProducerMetrics,
        timeline: Timeline,
    ) -> None:
        self._engine = engine
        self._folder_for = folder_for
        self._proof = proof
        self._counters = counters
        self._metrics = metrics
        self._timeline = timeline
        self._ids = itertools.count(1)
        self._current: Adapter | None = None
        self._current_policy: PolicyInfo | None = None
        self._pins: dict[Adapter, int] = {}  # every loaded adapter
        self._flipped = asyncio.Event()
        self._offer: Arrival | None = None
        self._offered = asyncio.Event()
        self._session = 0

    @property
    def current(self) -> Adapter | None:
        """What new requests start on."""
        return self._current

    def follow(self, policy: PolicyInfo) -> None:
        """A new trainer process serves `policy`: a version that only its predecessor knew is no longer current."""
        self._session += 1
        self._offer = None
        if self._current_policy != policy:
            self._flip(None, None)

    def offer(self, arrival: Arrival) -> None:
        """Has `run` publish this version next, in place of an older one that still waits."""
        if arrival.policy != self._current_policy:
            self._offer = arrival
            self._offered.set()

    async def run(self) -> None:
        """Publishes what is offered, one version at a time."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            if self._offer is not None:
                offer, self._offer = self._offer, None
                await self.publish(*offer)

    async def publish(
        self,
        policy: PolicyInfo,
        blob: bytes,
        announced_at: float,
        probe: Probe | None = None,
        is_verified: bool = False,
    ) -> bool:
        """Loads a version beside the running ones, proves it and makes it current. The arguments are those of `Arrival`.

        Returns:
            False when it was refused, or its trainer is gone; nothing has changed then.
        """
        number = next(self._ids)
        name = f"v{policy.version}-{policy.digest[:8]}-{number}"
        adapter = Adapter(policy.version, name, number, self._folder_for(len(blob)) / name)
        session, started = self._session, time.monotonic()
        try:
            await asyncio.to_thread(unpack, blob, None if is_verified else policy.digest, adapter.path)
            await self._engine.load_adapter(adapter)
        except (BlobError, AdapterRefusedError, OSError) as error:
            shutil.rmtree(adapter.path, ignore_errors=True)
            self._refuse(policy.version, str(error))
            return False
        loaded = time.monotonic()
        refusal = None if probe is None else await self._prove(adapter, probe)
        self._pins[adapter] = 0  # not before, or the end of any request would unload it in mid-proof
        if refusal is not None:
            self._refuse(policy.version, refusal)
            await self.unload_idle()
            return False
        if session != self._session:  # its trainer died meanwhile
            await self.unload_idle()
            return False
        self._engine.adopt_adapter(adapter)
        self._flip(adapter, policy)
        self._counters.swaps += 1
        now = time.monotonic()
        swap_ms, load_ms, probe_ms = (now - announced_at) * 1000, (loaded - started) * 1000, (now - loaded) * 1000
        self._metrics.swap_s.observe(now - announced_at)
        self._metrics.load_s.observe(loaded - started)
        numbers = {"load_ms": load_ms, "probe_ms": probe_ms, "bytes": len(blob)}
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        self._timeline.record("swap", version=policy.version, ms=round(swap_ms, 3), **rounded)
        logger.info(
            "policy v%d is live (%.0f ms after its announcement)",
            policy.version,
            swap_ms,
            extra={"fields": {"swap_ms": swap_ms} | numbers},
        )
        await self.unload_idle()
        return True

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[Adapter]:
        """The current adapter, kept loaded for the duration of the context. Only after `wait_for`."""
        adapter = self._current
        assert adapter is not None
        self._pins[adapter] += 1
        try:
            yield adapter
        finally:
            self._pins[adapter] -= 1
            await self.unload_idle()

    async def wait_for(self, floor: int) -> None:
        """Returns once the current version is `floor` or newer. The caller sets the deadline."""
        while self._current is None or self._current.version < floor:
            await self._flipped.wait()

    def has_newer(self, adapter: Adapter) -> bool:
        """Whether the current version is newer than `adapter`."""
        return self._current is not None and self._current.version > adapter.version

    async def _prove(self, adapter: Adapter, probe: Probe) -> str | None:
        try:
            return self._proof.judge(probe, await self._engine.score(list(probe.token_ids), adapter))
        except AdapterRefusedError as error:
            logger.warning("policy v%d cannot be proved: %s", adapter.version, error)
            return None

    def _refuse(self, version: int, reason: str) -> None:
        counters, current = self._counters, self._current
        counters.failed_swaps += 1
        counters.refused_version, counters.refusal = version, reason[:_MAX_REASON]
        kept = f"v{current.version} stays" if current else "no version is served yet"
        logger.error("policy v%d is refused, %s: %s", version, kept, reason)
        self._timeline.record("swap_refused", version=version, reason=reason)

    def _flip(self, adapter: Adapter | None, policy: PolicyInfo | None) -> None:
        self._current, self._current_policy = adapter, policy
        self._counters.policy_version = -1 if adapter is None else adapter.version
        self._counters.refused_version, self._counters.refusal = -1, ""
        logs.bind(version=None if adapter is None else adapter.version)
        self._flipped.set()
        self._flipped = asyncio.Event()

    async def unload_idle(self) -> None:
        """Unloads what is neither current nor pinned, then deletes its folder."""
        for adapter in [a for a, pins in self._pins.items() if pins == 0 and a is not self._current]:
            if self._pins.pop(adapter, None) is None:
                continue  # another task was faster while this one awaited
            await self._engine.unload_adapter(adapter)
            shutil.rmtree(adapter.path, ignore_errors=True)
            logger.debug("policy v%d unloaded", adapter.version)
