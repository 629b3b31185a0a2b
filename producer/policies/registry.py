"""The policy versions that the engine holds.

Guarantee: a request runs on the adapter it pinned to its end. Every load has a name, an id and a folder of its own; a
superseded version is unloaded, and its folder deleted after that, only when nothing pins it and it is not the one that is
evaluated. Who lets a version go does not wait for that and cannot be cancelled in the middle of it: the registry's own task
unloads. A version that cannot be loaded, or that the engine does not compute as the trainer does, changes nothing: the one
before stays current. An evaluated version that is not here any more is fetched and loaded beside the current one; an engine
that has one version at a time (`swap.mode: merged`) keeps it instead, for a while, when a newer one has arrived. (vLLM dies
when it has to re-read an adapter whose folder is gone, and confuses two adapters of one name: docs/architecture.md, "The
swap".)
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from producer.interfaces import (
    Adapter,
    AdapterRefusedError,
    Counters,
    DownloadedPolicy,
    LeaseFailure,
    PolicyWeights,
    Probe,
)
from producer.metrics import ProducerMetrics
from producer.policies.verification import SwapProof
from producer.timeline import Timeline
from protocol.service import logs
from protocol.wire.adapter_blob import BlobError, unpack
from protocol.wire.messages import PolicyInfo

logger = logging.getLogger(__name__)

_MAX_REASON = 500  # characters of it that the trainer is told
_MAX_UNAVAILABLE = 16  # policies that are known not to be had; few are evaluated at a time


class AdapterRegistry:
    """Which adapter new requests start on, and which old ones are still needed.

    Args:
        folder_for: where an adapter of so many bytes is unpacked; ours alone.
        fetch: asks for a policy that is not the newest; answered by `on_fetched` or `on_unavailable`.
        hold_s: how long a newer version waits for an evaluation; None: the engine has several versions at once.
    """

    def __init__(
        self,
        weights: PolicyWeights,
        folder_for: Callable[[int], Path],
        proof: SwapProof,
        counters: Counters,
        metrics: ProducerMetrics,
        timeline: Timeline,
        fetch: Callable[[PolicyInfo], None] = lambda policy: None,
        hold_s: float | None = None,
    ) -> None:
        self._weights = weights
        self._folder_for = folder_for
        self._proof = proof
        self._counters = counters
        self._metrics = metrics
        self._timeline = timeline
        self._ids = itertools.count(1)
        self._current: Adapter | None = None
        self._current_policy: PolicyInfo | None = None
        self._pins: dict[Adapter, int] = {}  # every loaded adapter
        self._released = asyncio.Event()
        self._flipped = asyncio.Event()
        self._offer: DownloadedPolicy | None = None
        self._offered = asyncio.Event()
        self._session = 0
        self._fetch = fetch
        self._hold_s = hold_s
        self._policies: dict[Adapter, PolicyInfo] = {}  # of every loaded adapter
        self._evaluated: Adapter | None = None  # stays loaded until another one is evaluated
        self._fetched_policy: DownloadedPolicy | None = None
        self._fetched = asyncio.Event()
        self._unavailable: deque[PolicyInfo] = deque(maxlen=_MAX_UNAVAILABLE)
        self._in_evaluation: PolicyInfo | None = None
        self._may_swap = asyncio.Event()  # with `hold_s`
        self._may_swap.set()

    @property
    def current(self) -> Adapter | None:
        """What new requests start on."""
        return self._current

    def start_session(self, policy: PolicyInfo) -> None:
        """A new trainer process serves `policy`: a version that only its predecessor knew is no longer current."""
        self._session += 1
        self._offer = self._evaluated = None
        self.note_evaluation(None)
        self._unavailable.clear()
        if self._current_policy != policy:
            self._flip(None, None)

    def offer(self, downloaded: DownloadedPolicy) -> None:
        """Has `run` publish this version next, in place of an older one that still waits."""
        if downloaded.policy != self._current_policy:
            self._offer = downloaded
            self._offered.set()

    def on_fetched(self, downloaded: DownloadedPolicy) -> None:
        """What `fetch` asked for is here."""
        self._fetched_policy = downloaded
        self._offered.set()

    def on_unavailable(self, policy: PolicyInfo) -> None:
        """The trainer does not have it any more."""
        self._unavailable.append(policy)
        self._tell_fetched()

    def note_evaluation(self, policy: PolicyInfo | None) -> None:
        """The trainer evaluates this one now, or none. Between two of its leases, too, which a producer cannot know."""
        self._in_evaluation = policy
        if policy is None or policy != self._current_policy:
            self._may_swap.set()
        else:
            self._may_swap.clear()

    async def run(self) -> None:
        """Publishes what is offered and loads what was fetched, one version at a time."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            if self._fetched_policy is not None:
                downloaded, self._fetched_policy = self._fetched_policy, None
                await self._load_for_evaluation(downloaded)
            if self._offer is not None:
                if self._hold_s is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._may_swap.wait(), self._hold_s)
                offer, self._offer = self._offer, None
                if offer is not None:  # else another trainer came meanwhile
                    await self.publish(*offer)

    async def unload_released(self) -> None:
        """Unloads what requests have let go, one version after the other, until it is cancelled."""
        while True:
            await self._released.wait()
            self._released.clear()
            await self.unload_idle()

    async def publish(
        self,
        policy: PolicyInfo,
        blob: bytes,
        announced_at: float,
        probe: Probe | None = None,
        is_verified: bool = False,
    ) -> bool:
        """Loads a version beside the running ones, proves it and makes it current. The arguments are those of `DownloadedPolicy`.

        Returns:
            False when it was refused, or its trainer is gone; nothing has changed then.
        """
        session, started = self._session, time.monotonic()
        adapter = self._adapter(policy, len(blob))
        if (problem := await self._load(adapter, policy, blob, is_verified)) is not None:
            self.refuse(policy.version, problem)
            return False
        loaded = time.monotonic()
        refusal = None if probe is None else await self._prove(adapter, probe)
        self._pins[adapter] = 0  # not before, or the end of any request would unload it in mid-proof
        if refusal is not None:
            self.refuse(policy.version, refusal)
            await self.unload_idle()
            return False
        if session != self._session:  # its trainer died meanwhile
            await self.unload_idle()
            return False
        self._weights.activate(adapter)
        self._policies[adapter] = policy
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

    @contextmanager
    def pin(self) -> Iterator[Adapter]:
        """The current adapter, kept loaded for the duration of the context. Only after `wait_for`."""
        assert self._current is not None
        with self._pinned(self._current) as adapter:
            yield adapter

    @contextmanager
    def _pinned(self, adapter: Adapter) -> Iterator[Adapter]:
        self._pins[adapter] += 1
        try:
            yield adapter
        finally:
            self._pins[adapter] -= 1
            self._released.set()

    @asynccontextmanager
    async def pin_evaluated(self, policy: PolicyInfo) -> AsyncIterator[Adapter]:
        """The adapter of exactly this policy, fetched if need be, kept loaded for the duration of the context and beyond,
        until another policy is evaluated. The caller sets the deadline.

        Raises:
            LeaseFailure: this producer cannot serve it.
        """
        await self.wait_for(policy.version)
        while (adapter := self._serving(policy)) is None:
            if self._hold_s is not None:
                raise LeaseFailure(
                    "no_policy", f"v{policy.version} is evaluated, and the engine has other weights by now"
                )
            if policy in self._unavailable:
                raise LeaseFailure("no_policy", f"v{policy.version} is evaluated, and could not be had or loaded here")
            self._fetch(policy)
            await self._fetched.wait()
        self._evaluated = adapter
        self.note_evaluation(policy)
        with self._pinned(adapter):
            yield adapter

    async def wait_for(self, floor: int) -> None:
        """Returns once the current version is `floor` or newer. The caller sets the deadline."""
        while self._current is None or self._current.version < floor:
            await self._flipped.wait()

    def has_newer(self, adapter: Adapter) -> bool:
        """Whether the current version is newer than `adapter`."""
        return self._current is not None and self._current.version > adapter.version

    def _serving(self, policy: PolicyInfo) -> Adapter | None:
        """The adapter of this policy that a request may begin on."""
        if self._hold_s is not None:
            return self._current if self._current_policy == policy else None
        return next((adapter for adapter, known in self._policies.items() if known == policy), None)

    def _adapter(self, policy: PolicyInfo, num_bytes: int) -> Adapter:
        number = next(self._ids)
        name = f"v{policy.version}-{policy.digest[:8]}-{number}"
        return Adapter(policy.version, name, number, self._folder_for(num_bytes) / name)

    async def _load(self, adapter: Adapter, policy: PolicyInfo, blob: bytes, is_verified: bool) -> str | None:
        """Unpacks it and has the engine read it. Returns why that cannot be done; nothing is left of it then."""
        try:
            await asyncio.to_thread(unpack, blob, None if is_verified else policy.digest, adapter.path)
            await self._weights.load(adapter)
        except (BlobError, AdapterRefusedError, OSError) as error:
            shutil.rmtree(adapter.path, ignore_errors=True)
            return str(error)
        return None

    async def _load_for_evaluation(self, downloaded: DownloadedPolicy) -> None:
        """Loads and proves what was fetched for an evaluation."""
        policy = downloaded.policy
        adapter = self._adapter(policy, len(downloaded.blob))
        refusal = await self._load(adapter, policy, downloaded.blob, downloaded.is_verified)
        if refusal is None:
            if downloaded.probe is not None:
                refusal = await self._prove(adapter, downloaded.probe)
            self._pins[adapter] = 0
            if refusal is None:
                self._weights.activate(adapter)
                self._policies[adapter], self._evaluated = policy, adapter
        if refusal is not None:
            logger.error("policy v%d cannot be evaluated here: %s", policy.version, refusal)
            self._unavailable.append(policy)
        self._tell_fetched()
        await self.unload_idle()

    def _tell_fetched(self) -> None:
        self._fetched.set()
        self._fetched = asyncio.Event()

    async def _prove(self, adapter: Adapter, probe: Probe) -> str | None:
        try:
            return self._proof.judge(probe, await self._weights.verify(adapter, list(probe.token_ids)))
        except AdapterRefusedError as error:
            logger.warning("policy v%d cannot be proved: %s", adapter.version, error)
            return None

    def refuse(self, version: int, reason: str) -> None:
        """Notes that a version is not served, for the trainer, `/readyz` and the metrics."""
        counters, current = self._counters, self._current
        counters.failed_swaps += 1
        counters.refused_version, counters.refusal = version, reason[:_MAX_REASON]
        kept = f"v{current.version} stays" if current else "no version is served yet"
        logger.error("policy v%d is refused, %s: %s", version, kept, reason)
        self._timeline.record("swap_refused", version=version, reason=reason)

    def _flip(self, adapter: Adapter | None, policy: PolicyInfo | None) -> None:
        self._current, self._current_policy = adapter, policy
        self.note_evaluation(self._in_evaluation)
        self._counters.policy_version = -1 if adapter is None else adapter.version
        self._counters.refused_version, self._counters.refusal = -1, ""
        logs.bind(version=None if adapter is None else adapter.version)
        self._flipped.set()
        self._flipped = asyncio.Event()

    def _idle(self) -> Adapter | None:
        kept = (self._current, self._evaluated)
        return next((adapter for adapter, pins in self._pins.items() if pins == 0 and adapter not in kept), None)

    async def unload_idle(self) -> None:
        """Unloads what is neither current, nor evaluated, nor pinned, then deletes its folder."""
        while (adapter := self._idle()) is not None:  # looked for again after every wait: others pin meanwhile
            del self._pins[adapter]
            self._policies.pop(adapter, None)
            await self._weights.discard(adapter)
            shutil.rmtree(adapter.path, ignore_errors=True)
            logger.debug("policy v%d unloaded", adapter.version)
