"""The published policies that producers can download.

Guarantee: the newest policy is always there, with the few before it and the one that is held; any thread may publish, any may
read. A policy lies in
memory once: in the file that producers of this host read, where there is room for one. The memory of one that goes is given
back, and not before.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from protocol.files.shared_memory import SharedMemory
from protocol.wire.messages import BlobChunk, BlobMissing, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest


class _Blob(NamedTuple):
    data: memoryview
    offer: PolicyOffer
    release: Callable[[], None]


class PolicyShelf:
    """Keeps the last `keep` adapter blobs by digest.

    Args:
        memory: for the files.
    """

    def __init__(self, keep: int, memory: SharedMemory) -> None:
        self._keep = keep
        self._memory = memory
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, _Blob] = OrderedDict()
        self._newest: PolicyInfo | None = None
        self._held: str | None = None  # a digest

    @property
    def newest(self) -> PolicyInfo:
        """Only after the first `publish`."""
        assert self._newest is not None, "publish a policy first"
        return self._newest

    def publish(
        self,
        version: int,
        data: bytes | memoryview,
        digest: str,
        probe: tuple[bytes, bytes],
        release: Callable[[], None],
    ) -> None:
        """
        Args:
            probe: tokens and log-probs, as a `PolicyOffer` has them.
            release: is called when `data` is not needed any more.
        """
        blob = self._blob(data, digest, probe, release)
        with self._lock:
            gone = [self._blobs.pop(digest)] if digest in self._blobs else []
            self._blobs[digest] = blob
            self._newest = PolicyInfo(version, digest, len(blob.data))
            gone += self._superseded()
        for blob in gone:
            blob.release()

    def hold(self, digest: str, data: bytes, probe: tuple[bytes, bytes]) -> None:
        """Keeps this policy, which is put here if it is not, until another is held or it is let go."""
        with self._lock:
            self._held = digest
            known = digest in self._blobs
        if not known:
            blob = self._blob(data, digest, probe, lambda: None)
            with self._lock:
                self._blobs[digest] = blob
                self._blobs.move_to_end(digest, last=False)

    def let_go(self) -> None:
        with self._lock:
            self._held = None
            gone = self._superseded()
        for blob in gone:
            blob.release()

    def chunk(self, request: BlobRequest) -> BlobChunk | BlobMissing:
        with self._lock:  # a blob that is given back may be written to at once
            blob = self._blobs.get(request.digest)
            part = bytes(blob.data[request.offset : request.offset + request.length]) if blob else b""
        return BlobChunk(request.digest, request.offset, part) if part else BlobMissing(request.digest)

    def offer(self, request: PolicyRequest) -> PolicyOffer | BlobMissing:
        with self._lock:
            blob = self._blobs.get(request.digest)
        return blob.offer if blob else BlobMissing(request.digest)

    def _blob(
        self, data: bytes | memoryview, digest: str, probe: tuple[bytes, bytes], release: Callable[[], None]
    ) -> _Blob:
        file = self._memory.write(memoryview(data))
        if file is not None:
            release()
            data, release = _mapped(file), partial(file.unlink, missing_ok=True)
        return _Blob(memoryview(data), PolicyOffer(digest, str(file or ""), *probe), release)

    def _superseded(self) -> list[_Blob]:
        """Takes out all but the newest and the one that is held. With the lock."""
        others = [digest for digest in self._blobs if digest != self._held]
        return [self._blobs.pop(digest) for digest in others[: -self._keep]]


def _mapped(file: Path) -> memoryview:
    with file.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
