"""The policy versions that the engine holds.

Guarantee: a request runs on the adapter it pinned to its end. Every load has a name, an id and a folder of its own; a
superseded version is unloaded, and its folder deleted after that, only when nothing pins it. A version that cannot be
loaded changes nothing: the one before stays current. (vLLM dies when it has to re-read an adapter whose folder is gone,
and confuses two adapters of one name: docs/architecture.md, "The swap".)
"""

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from producer.interfaces import Adapter, AdapterRefusedError, Counters, GenerationEngine
from producer.timeline import Timeline
from protocol.adapter_blob import BlobError, unpack
from protocol.messages import PolicyInfo

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """Which adapter new requests start on, and which old ones are still needed.

    Args:
        folder: where adapters are unpacked; ours alone.
    """

    def __init__(self, engine: GenerationEngine, folder: Path, counters: Counters, timeline: Timeline) -> None:
        self._engine = engine
        self._folder = folder
        self._counters = counters
        self._timeline = timeline
        self._ids = itertools.count(1)
        self._current: Adapter | None = None
        self._current_policy: PolicyInfo | None = None
        self._pins: dict[Adapter, int] = {}  # every loaded adapter
        self._flipped = asyncio.Event()
        self._offer: tuple[PolicyInfo, bytes, float] | None = None
        self._offered = asyncio.Event()
        self._session = 0

    def follow(self, policy: PolicyInfo) -> None:
        """A new trainer process serves `policy`: a version that only its predecessor knew is no longer current."""
        self._session += 1
        self._offer = None
        if self._current_policy != policy:
            self._flip(None, None)

    def offer(self, policy: PolicyInfo, blob: bytes, announced_at: float) -> None:
        """Has `run` publish this version next, in place of an older one that still waits."""
        if policy != self._current_policy:
            self._offer = (policy, blob, announced_at)
            self._offered.set()

    async def run(self) -> None:
        """Publishes what is offered, one version at a time."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            if self._offer is not None:
                offer, self._offer = self._offer, None
                await self.publish(*offer)

    async def publish(self, policy: PolicyInfo, blob: bytes, announced_at: float) -> bool:
        """Loads a version beside the running ones and makes it current.

        Args:
            announced_at: `time.monotonic()` when this producer heard of it.

        Returns:
            False when it could not be loaded, or its trainer is gone; nothing has changed then.
        """
        number = next(self._ids)
        name = f"v{policy.version}-{policy.digest[:8]}-{number}"
        adapter = Adapter(policy.version, name, number, self._folder / name)
        session, started = self._session, time.monotonic()
        try:
            await asyncio.to_thread(unpack, blob, policy.digest, adapter.path)
            await self._engine.load_adapter(adapter)
        except (BlobError, AdapterRefusedError, OSError) as error:
            shutil.rmtree(adapter.path, ignore_errors=True)
            self._counters.failed_swaps += 1
            kept = f"v{self._current.version} stays" if self._current else "no version is loaded yet"
            logger.error("policy v%d could not be loaded, %s: %s", policy.version, kept, error)
            self._timeline.record("swap_failed", version=policy.version, reason=str(error))
            return False
        self._pins[adapter] = 0
        if session != self._session:  # its trainer died meanwhile
            await self.unload_idle()
            return False
        self._flip(adapter, policy)
        self._counters.swaps += 1
        now = time.monotonic()
        swap_ms, load_ms = (now - announced_at) * 1000, (now - started) * 1000
        self._timeline.record(
            "swap", version=policy.version, ms=round(swap_ms, 3), load_ms=round(load_ms, 3), bytes=len(blob)
        )
        logger.info("policy v%d is live (%.0f ms after its announcement)", policy.version, swap_ms)
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

    def _flip(self, adapter: Adapter | None, policy: PolicyInfo | None) -> None:
        self._current, self._current_policy = adapter, policy
        self._counters.policy_version = -1 if adapter is None else adapter.version
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
