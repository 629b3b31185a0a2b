"""The published policies that producers can download.

Guarantee: the newest policy is always there, with the few before it; any thread may publish, any may read.
"""

import threading
from collections import OrderedDict

from protocol.messages import BlobChunk, BlobMissing, BlobRequest, PolicyInfo


class PolicyShelf:
    """Keeps the last `keep` adapter blobs by digest."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._newest: PolicyInfo | None = None

    @property
    def newest(self) -> PolicyInfo:
        """Only after the first `publish`."""
        assert self._newest is not None, "publish a policy first"
        return self._newest

    def publish(self, version: int, data: bytes, digest: str) -> None:
        with self._lock:
            self._blobs[digest] = data
            self._blobs.move_to_end(digest)
            while len(self._blobs) > self._keep:
                self._blobs.popitem(last=False)
            self._newest = PolicyInfo(version, digest, len(data))

    def chunk(self, request: BlobRequest) -> BlobChunk | BlobMissing:
        with self._lock:
            data = self._blobs.get(request.digest, b"")
        if request.offset >= len(data):
            return BlobMissing(request.digest)
        return BlobChunk(request.digest, request.offset, data[request.offset : request.offset + request.length])
