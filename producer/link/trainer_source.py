"""The trainer as a source of policies: it offers each as a file of its host, and sends it in chunks where that cannot be read.

Guarantee: every byte is in its place, whichever messages were lost, repeated or reordered; what has arrived is not asked for
again, also after a reconnect. A file is read and verified on a thread of its own, so that the link goes on; whatever is wrong
with it, the policy comes in chunks.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from producer.interfaces import DownloadedPolicy
from producer.policies.downloads import Done
from producer.policies.verification import probe_of
from protocol.files.shared_memory import UnusableFileError, read_offered
from protocol.wire.adapter_blob import BlobError, verify
from protocol.wire.messages import BlobChunk, BlobMissing, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest

logger = logging.getLogger(__name__)

_WINDOW = 4  # requests for chunks that are on their way at a time
_REPEAT_AFTER_S = 2.0


@dataclass
class Download:
    """What is known of one policy on its way, as a file or in chunks of `chunk_bytes`."""

    policy: PolicyInfo
    chunk_bytes: int
    done: Done
    offer: PolicyOffer | None = None
    reads_file: bool = False
    asked_at: dict[int | None, float] = field(default_factory=dict)  # by offset; None: for the offer
    _announced_at: float = field(default_factory=time.monotonic)
    _chunks: dict[int, bytes] = field(default_factory=dict)

    @property
    def _offsets(self) -> range:
        return range(0, self.policy.num_bytes, self.chunk_bytes)

    def due_requests(self, now: float, *, knows_offers: bool) -> list[PolicyRequest | BlobRequest]:
        """What to ask for now: the offer, then as much as the window has room for; and what stayed unanswered for too long."""
        digest = self.policy.digest
        if self.reads_file:
            return []
        if self.offer is None and knows_offers:
            return [PolicyRequest(digest)] if self._is_due(None, now) else []
        missing = islice((offset for offset in self._offsets if offset not in self._chunks), _WINDOW)
        due = [offset for offset in missing if self._is_due(offset, now)]
        return [BlobRequest(digest, offset, self._length(offset)) for offset in due]

    def _is_due(self, what: int | None, now: float) -> bool:
        """Notes that it is asked for now, if so."""
        if now - self.asked_at.get(what, -math.inf) < _REPEAT_AFTER_S:
            return False
        self.asked_at[what] = now
        return True

    def receive(self, chunk: BlobChunk) -> bytes | None:
        """Returns all bytes when this chunk was the last one missing."""
        if chunk.offset in self._chunks or chunk.offset not in self._offsets:
            return None
        if len(chunk.data) != self._length(chunk.offset):
            return None
        self._chunks[chunk.offset] = chunk.data
        if len(self._chunks) < len(self._offsets):
            return None
        return b"".join(self._chunks[offset] for offset in self._offsets)

    def _length(self, offset: int) -> int:
        return min(self.chunk_bytes, self.policy.num_bytes - offset)

    def downloaded(self, blob: bytes, *, is_verified: bool) -> DownloadedPolicy:
        probe = None if self.offer is None else probe_of(self.offer)
        return DownloadedPolicy(self.policy, blob, self._announced_at, probe, is_verified)


@dataclass
class TrainerSource:
    """A `PolicySource`. Belongs to the link's thread, which `post` has do something, from any thread."""

    chunk_bytes: int
    post: Callable[[Callable[[], None]], None]
    _downloads: dict[str, Download] = field(default_factory=dict)  # by digest

    def fetch(self, policy: PolicyInfo, done: Done) -> None:
        self._downloads[policy.digest] = Download(policy, self.chunk_bytes, done)

    def cancel(self, digest: str) -> None:
        self._downloads.pop(digest, None)

    def due_requests(self, now: float, *, knows_offers: bool = True) -> list[PolicyRequest | BlobRequest]:
        """A trainer of the release before knows no offers."""
        downloads = self._downloads.values()
        return [request for each in downloads for request in each.due_requests(now, knows_offers=knows_offers)]

    def forget_requests(self) -> None:
        """The connection is gone, and every request with it."""
        for download in self._downloads.values():
            download.asked_at.clear()

    def receive(self, message: PolicyOffer | BlobChunk | BlobMissing) -> None:
        """Takes in an answer of the trainer."""
        download = self._downloads.get(message.digest)
        if download is None:
            return
        match message:
            case PolicyOffer() if download.offer is None:
                download.offer, download.reads_file = message, bool(message.shared_file)
                if download.reads_file:
                    arguments = (download.policy, message.shared_file)
                    threading.Thread(target=self._read, args=arguments, name="shared-file", daemon=True).start()
            case BlobChunk() if (blob := download.receive(message)) is not None:
                self._finish(download, download.downloaded(blob, is_verified=False))
            case BlobMissing():
                self._finish(download, None)

    def take_file(self, digest: str, blob: bytes | None) -> None:
        """The verified content of the file that was offered. None: it cannot be used, and the policy comes in chunks."""
        download = self._downloads.get(digest)
        if download is not None and download.reads_file:
            download.reads_file = False
            if blob is not None:
                self._finish(download, download.downloaded(blob, is_verified=True))

    def _finish(self, download: Download, downloaded: DownloadedPolicy | None) -> None:
        del self._downloads[download.policy.digest]
        download.done(downloaded)

    def _read(self, policy: PolicyInfo, path: str) -> None:
        content: bytes | None = None
        try:
            content = read_offered(path, policy.num_bytes)
            verify(content, policy.digest)
        except (UnusableFileError, BlobError) as error:
            logger.info("policy v%d comes over the wire, its file cannot be used: %s", policy.version, error)
            content = None
        self.post(partial(self.take_file, policy.digest, content))
