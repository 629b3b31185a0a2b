"""The published policies that producers can download.

Guarantee: the newest policy is always there, with the few before it, the one that is pinned, and the anchors of all these; any
thread may publish, any may read. A policy is in memory once: in the file that producers of this host read, where there is room
for one. Its memory is given back when it leaves the store, and not before.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from protocol.runtime.scratch import SharedMemory
from protocol.wire.adapter_blob import Anchor
from protocol.wire.messages import BlobChunk, BlobMissing, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest, Probe


@dataclass(frozen=True)
class PublishedPolicy:
    """A packed adapter or patch, the anchor of the patch, and the probe that proves that it arrived."""

    version: int
    digest: str  # sha256 of `data` in hex
    data: bytes | memoryview
    probe: Probe | None = None
    release: Callable[[], None] = lambda: None  # is called when `data` is not needed any more
    anchor: Anchor | None = None

    @property
    def anchor_info(self) -> PolicyInfo | None:
        return self.anchor and PolicyInfo(self.version, self.anchor.digest, len(self.anchor.data))

    @property
    def info(self) -> PolicyInfo:
        return PolicyInfo(self.version, self.digest, len(self.data))


class Snapshot(Protocol):
    """The weights of a moment, perhaps still on their way to host memory. Call `release` once they are not needed."""

    @property
    def release(self) -> Callable[[], None]: ...

    def published(self, version: int) -> PublishedPolicy:
        """Return the policy of this version, which releases the snapshot. Waits until everything is there."""


class _Blob(NamedTuple):
    data: memoryview
    offer: PolicyOffer
    release: Callable[[], None]


@dataclass(eq=False)
class PolicyStore:
    """The last `keep` policies by digest, where there is room as files in `memory`."""

    keep: int
    memory: SharedMemory
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _blobs: OrderedDict[str, _Blob] = field(default_factory=OrderedDict)
    _newest: PolicyInfo | None = None
    _pinned: str | None = None  # a digest
    _anchors: dict[str, str] = field(default_factory=dict)  # digests, of the newest policy and of the pinned one

    @property
    def newest(self) -> PolicyInfo:
        """The newest policy, after the first `publish`."""
        assert self._newest is not None, "publish a policy first"
        return self._newest

    def is_newest(self, digest: str) -> bool:
        """Return whether every producer needs this blob: it is that of the newest policy, or of its anchor."""
        return digest in (self.newest.digest, self._anchors.get("newest"))

    def publish(self, policy: PublishedPolicy) -> None:
        self._add_anchor("newest", policy)
        blob = self._blob(policy)
        with self._update() as gone:
            if policy.digest in self._blobs:
                gone.append(self._blobs.pop(policy.digest))
            self._blobs[policy.digest] = blob
            self._newest = policy.info

    def pin(self, policy: PublishedPolicy) -> None:
        """Keep this policy, which is added if it is not here, until another is pinned or it is unpinned."""
        with self._lock:
            self._pinned = policy.digest
        self._add_anchor("pinned", policy)
        self._add_old(policy)

    def unpin(self) -> None:
        with self._update():
            self._pinned = None
            self._anchors.pop("pinned", None)

    def _add_anchor(self, of: str, policy: PublishedPolicy) -> None:
        """Keep the anchor of a policy, from before the policy is offered."""
        with self._lock:
            self._anchors.pop(of, None)
            if policy.anchor is not None:
                self._anchors[of] = policy.anchor.digest
        if policy.anchor is not None:
            self._add_old(PublishedPolicy(policy.version, *policy.anchor))

    def _add_old(self, policy: PublishedPolicy) -> None:
        """Add a policy, unless it is here, as the one that has been here longest."""
        with self._lock:
            if policy.digest in self._blobs:
                return
        blob = self._blob(policy)
        with self._update() as gone:
            if policy.digest in self._blobs:  # it was added meanwhile
                gone.append(blob)
            else:
                self._blobs[policy.digest] = blob
                self._blobs.move_to_end(policy.digest, last=False)

    def chunk(self, request: BlobRequest) -> BlobChunk | BlobMissing:
        with self._lock:  # a blob that is given back may be written to at once
            blob = self._blobs.get(request.digest)
            part = bytes(blob.data[request.offset : request.offset + request.length]) if blob else b""
        return BlobChunk(request.digest, request.offset, part) if part else BlobMissing(request.digest)

    def offer(self, request: PolicyRequest) -> PolicyOffer | BlobMissing:
        with self._lock:
            blob = self._blobs.get(request.digest)
        return blob.offer if blob else BlobMissing(request.digest)

    def _blob(self, policy: PublishedPolicy) -> _Blob:
        data, release = policy.data, policy.release
        file = self.memory.write(memoryview(data))
        if file is not None:
            release()
            data, release = _mapped(file), partial(file.unlink, missing_ok=True)
        offer = PolicyOffer(policy.digest, str(file or ""), policy.probe, anchor=policy.anchor_info)
        return _Blob(memoryview(data), offer, release)

    @contextmanager
    def _update(self) -> Iterator[list[_Blob]]:
        """Hold the lock; then evict all but the newest `keep`, the pinned policy and the anchors, and free them."""
        gone: list[_Blob] = []
        with self._lock:
            yield gone
            others = [digest for digest in self._blobs if digest != self._pinned]
            old = dict.fromkeys(others[: -self.keep])
            anchors = [blob.offer.anchor for digest, blob in self._blobs.items() if digest not in old]
            needed = {anchor.digest for anchor in anchors if anchor is not None} | set(self._anchors.values())
            gone += [self._blobs.pop(digest) for digest in old if digest not in needed]
        for blob in gone:
            blob.release()


def _mapped(file: Path) -> memoryview:
    with file.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
