"""The trainer as a source of policies: it offers each as a file of its host, and sends it in chunks where that cannot be read.

Guarantee: every byte is in its place, whichever messages were lost, repeated or reordered; what has arrived is not asked for
again, also after a reconnect. A file is read and verified on a thread of its own, so that the link goes on; whatever is wrong
with it, the policy comes in chunks.
"""

import logging
import threading
import time
from collections.abc import Callable
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


class ChunkDownload:
    """The bytes of `policy`, in chunks of `chunk_bytes`."""

    def __init__(self, policy: PolicyInfo, chunk_bytes: int) -> None:
        self._policy = policy
        self._chunk_bytes = chunk_bytes
        self._offsets = range(0, policy.num_bytes, chunk_bytes)
        self._chunks: dict[int, bytes] = {}
        self._asked_at: dict[int, float] = {}

    def due_requests(self, now: float) -> list[BlobRequest]:
        """What to ask for now: as much as the window has room for, and what stayed unanswered for too long."""
        requests = []
        missing = (offset for offset in self._offsets if offset not in self._chunks)
        for offset in islice(missing, _WINDOW):
            asked_at = self._asked_at.get(offset)
            if asked_at is None or now - asked_at >= _REPEAT_AFTER_S:
                self._asked_at[offset] = now
                requests.append(BlobRequest(self._policy.digest, offset, self._length(offset)))
        return requests

    def forget_requests(self) -> None:
        """The connection is gone, and every request with it."""
        self._asked_at.clear()

    def receive(self, chunk: BlobChunk) -> bytes | None:
        """Returns all bytes when this chunk was the last one missing."""
        if chunk.digest != self._policy.digest or chunk.offset in self._chunks:
            return None
        if chunk.offset not in self._offsets or len(chunk.data) != self._length(chunk.offset):
            return None
        self._chunks[chunk.offset] = chunk.data
        if len(self._chunks) < len(self._offsets):
            return None
        return b"".join(self._chunks[offset] for offset in self._offsets)

    def _length(self, offset: int) -> int:
        return min(self._chunk_bytes, self._policy.num_bytes - offset)


class _Download:
    """What is known of one policy on its way."""

    def __init__(self, policy: PolicyInfo, chunk_bytes: int, done: Done) -> None:
        self.policy = policy
        self.done = done
        self.chunks = ChunkDownload(policy, chunk_bytes)
        self.offer: PolicyOffer | None = None
        self.reads_file = False
        self._announced_at = time.monotonic()
        self._asked_at: float | None = None  # for the offer

    def due_requests(self, now: float, *, knows_offers: bool) -> list[PolicyRequest | BlobRequest]:
        if self.reads_file:
            return []
        if self.offer is not None or not knows_offers:
            return list(self.chunks.due_requests(now))
        if self._asked_at is not None and now - self._asked_at < _REPEAT_AFTER_S:
            return []
        self._asked_at = now
        return [PolicyRequest(self.policy.digest)]

    def forget_requests(self) -> None:
        self._asked_at = None
        self.chunks.forget_requests()

    def downloaded(self, blob: bytes, *, is_verified: bool) -> DownloadedPolicy:
        probe = None if self.offer is None else probe_of(self.offer)
        return DownloadedPolicy(self.policy, blob, self._announced_at, probe, is_verified)


class TrainerSource:
    """A `PolicySource`. Belongs to the link's thread.

    Args:
        post: has the link's thread call `take_file` with these arguments. It may be called from any thread.
    """

    def __init__(self, chunk_bytes: int, post: Callable[[str, bytes | None], None]) -> None:
        self._chunk_bytes = chunk_bytes
        self._post = post
        self._downloads: dict[str, _Download] = {}  # by digest

    def fetch(self, policy: PolicyInfo, done: Done) -> None:
        self._downloads[policy.digest] = _Download(policy, self._chunk_bytes, done)

    def cancel(self, digest: str) -> None:
        self._downloads.pop(digest, None)

    def due_requests(self, now: float, *, knows_offers: bool = True) -> list[PolicyRequest | BlobRequest]:
        """
        Args:
            knows_offers: whether the trainer does. A trainer of the release before does not.
        """
        downloads = self._downloads.values()
        return [request for each in downloads for request in each.due_requests(now, knows_offers=knows_offers)]

    def forget_requests(self) -> None:
        """The connection is gone, and every request with it."""
        for download in self._downloads.values():
            download.forget_requests()

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
            case BlobChunk() if (blob := download.chunks.receive(message)) is not None:
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

    def _finish(self, download: _Download, downloaded: DownloadedPolicy | None) -> None:
        del self._downloads[download.policy.digest]
        download.done(downloaded)

    def _read(self, policy: PolicyInfo, path: str) -> None:
        """Reads a file, on a thread of its own."""
        content = None
        try:
            content = read_offered(path, policy.num_bytes)
            verify(content, policy.digest)
        except (UnusableFileError, BlobError) as error:
            content = None
            logger.info("policy v%d comes over the wire, its file cannot be used: %s", policy.version, error)
        self._post(policy.digest, content)
