"""Loads the bytes of a policy into the engine, and unloads it.

Guarantee: every load has a name, an id and a folder of its own. A refused load is undone, and nothing is left of a discarded
adapter. An engine that sleeps is asked for nothing. (vLLM dies when it has to read an adapter again whose folder is gone, and
confuses two adapters of one name.)
"""

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from producer.engine_contract import Adapter, AdapterFailedError, AdapterRefusedError, PolicyWeights, Scored
from producer.engine_gate import EngineGate
from producer.metrics import Verdict
from producer.policies.probe import ReceivedProbe, SwapProof
from protocol.wire.adapter_blob import Anchor, BlobError, DamagedBlobError, Unpack, unpack
from protocol.wire.messages import PolicyInfo


class DownloadedPolicy(NamedTuple):
    """A policy that is here, and the `time.monotonic()` when this producer heard of it. `probe` can prove that the engine serves
    it (None: not this policy); `is_verified`: its sha256 was seen to match; `anchor` is the blob on which a patch builds."""

    policy: PolicyInfo
    blob: bytes | memoryview
    announced_at: float
    probe: ReceivedProbe | None = None
    is_verified: bool = False
    anchor: Anchor | None = None


logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A policy that the engine has, verified, and how long that took, with the phases of the load that the engine tells."""

    adapter: Adapter
    load_s: float
    verify_s: float
    verdict: Verdict | None = None  # None: it was not proved by behaviour
    phases_s: dict[str, float] = {}  # noqa: RUF012 - of a NamedTuple


@dataclass
class PolicyLoader:
    """`folder_for` returns the folder for a policy of that many bytes; no other process uses it. `unpack` writes it there from
    its blob, given the sha256 that it has to have (None: it was verified) and the anchor, and returns the CRC-32 of what it
    wrote."""

    weights: PolicyWeights
    folder_for: Callable[[int], Path]
    proof: SwapProof
    gate: EngineGate = field(default_factory=EngineGate)
    unpack: Unpack = unpack
    _probed: ReceivedProbe | None = None
    _ids: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    async def load(self, downloaded: DownloadedPolicy) -> Loaded:
        """Loads a policy beside the others and verifies it; it is to be activated or discarded next. Raises AdapterRefusedError
        where it cannot be loaded, or the engine does not compute it, and AdapterFailedError where that may pass."""
        async with self.gate.use():
            return await self._load(downloaded)

    async def _load(self, downloaded: DownloadedPolicy) -> Loaded:
        policy, blob, anchor = downloaded.policy, downloaded.blob, downloaded.anchor
        number, started = next(self._ids), time.monotonic()
        name = f"v{policy.version}-{policy.digest[:8]}-{number}"
        path = self.folder_for(len(blob) + (len(anchor.data) if anchor else 0)) / name
        try:
            digest = None if downloaded.is_verified else policy.digest
            checksum = await asyncio.to_thread(self.unpack, blob, digest, path, anchor)
            adapter = Adapter(policy.version, name, number, path, checksum)
            if downloaded.probe is not None:
                await self._measure_base(downloaded.probe)
            phases_s = await self.weights.load(adapter) or {}
        except (BlobError, AdapterRefusedError, OSError, MemoryError) as error:
            shutil.rmtree(path, ignore_errors=True)
            may_pass = isinstance(error, AdapterFailedError | DamagedBlobError | OSError | MemoryError)
            kind = AdapterFailedError if may_pass else AdapterRefusedError
            raise kind(str(error) or type(error).__name__) from error
        loaded = time.monotonic()
        self._probed = downloaded.probe or self._probed
        verdict = None
        if downloaded.probe is not None and downloaded.probe.policy is not None:
            try:
                verdict = await self._verify(adapter, downloaded.probe)
            except AdapterFailedError:
                await self.discard(adapter)
                raise
        if verdict is not None and verdict.refusal:
            await self.discard(adapter)
            raise AdapterRefusedError(verdict.refusal)
        return Loaded(adapter, loaded - started, time.monotonic() - loaded, verdict, phases_s)

    async def measure(self, adapter: Adapter) -> list[Scored] | None:
        """Return the engine's scores, under a loaded policy, of the tokens that were probed last; None where there are none, or
        the engine does not score them. Asks the engine whatever the gate says."""
        if self._probed is None:
            return None
        try:
            return await self.weights.verify(adapter, self._probed.rows)
        except AdapterRefusedError:
            return None

    async def discard(self, adapter: Adapter) -> None:
        async with self.gate.upkeep():
            await self.weights.discard(adapter)
        shutil.rmtree(adapter.path, ignore_errors=True)
        logger.debug("policy v%d unloaded", adapter.version)

    async def _measure_base(self, probe: ReceivedProbe) -> None:
        """Measure the engine's base once, while it has it."""
        if not self.proof.needs_base(probe):
            return
        engine = None
        try:
            engine = await self.weights.verify(None, probe.rows)
        except AdapterFailedError:
            raise
        except AdapterRefusedError as error:
            logger.info("swaps are proved by changes from here on, not by changes since the base: %s", error)
        self.proof.note_base(probe, engine)

    async def _verify(self, adapter: Adapter, probe: ReceivedProbe) -> Verdict | None:
        """Judge the policy; None where the engine does not score. Raises AdapterFailedError where it failed to."""
        try:
            engine = await self.weights.verify(adapter, probe.rows)
        except AdapterFailedError:
            raise
        except AdapterRefusedError as error:
            logger.warning("policy v%d cannot be verified: %s", adapter.version, error)
            return None
        return self.proof.verdict(probe, engine)
