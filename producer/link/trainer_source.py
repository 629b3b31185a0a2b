"""The trainer as a source of policies: it offers each, says where else it can be had, and sends it in chunks where it cannot.

Guarantee: every byte is in its place, whichever messages were lost, repeated or reordered; what has arrived is not asked for
again, also after a reconnect. Other sources are tried on a thread of their own, so that the link goes on; whatever is wrong with
them, the policy comes in chunks. What came in chunks is verified, and shared with the producers of this host, on such a thread,
too.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from producer.policies.chunks import Chunks
from producer.policies.downloads import Done
from producer.policies.loader import DownloadedPolicy
from producer.policies.probe import probe_of
from producer.relays.neighbours import Found, Neighbours
from protocol.wire.messages import BlobChunk, BlobMissing, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest

logger = logging.getLogger(__name__)

_REPEAT_AFTER_S = 2.0


@dataclass(eq=False)
class Download:
    """What is known of one policy on its way."""

    policy: PolicyInfo
    chunks: Chunks
    done: Done
    offer: PolicyOffer | None = None
    found: Found | None = None  # nothing, after other sources were tried
    is_aside: bool = False  # a thread of its own looks for it, or verifies it
    cancelled: threading.Event = field(default_factory=threading.Event)
    announced_at: float = field(default_factory=time.monotonic)
    chunks_began_at: float = 0.0
    _offer_asked_at: float = -math.inf

    def due_requests(self, now: float) -> list[PolicyRequest | BlobRequest]:
        """What to ask for now: the offer, then chunks; and what stayed unanswered for too long."""
        if self.is_aside:
            return []
        if self.offer is None:
            if now - self._offer_asked_at < _REPEAT_AFTER_S:
                return []
            self._offer_asked_at = now
            return [PolicyRequest(self.policy.digest)]
        self._note_progress()
        return list[PolicyRequest | BlobRequest](self.chunks.due_requests(now))

    def forget_requests(self) -> None:
        self._offer_asked_at = -math.inf
        self.chunks.forget_requests()

    def receive(self, chunk: BlobChunk) -> bytes | None:
        blob = self.chunks.receive(chunk)
        self._note_progress()
        return blob

    def _note_progress(self) -> None:
        """For those who wait for this download."""
        if self.found is not None:
            self.found.claim.note(self.chunks.num_arrived)

    def release(self) -> None:
        """Another producer of this host may download it."""
        if self.found is not None:
            self.found.claim.release()

    def downloaded(self, blob: bytes, *, is_verified: bool) -> DownloadedPolicy:
        probe = None if self.offer is None else probe_of(self.offer)
        return DownloadedPolicy(self.policy, blob, self.announced_at, probe, is_verified)


@dataclass
class TrainerSource:
    """A `PolicySource`. Belongs to the link's thread, which `post` has do something, from any thread."""

    chunk_bytes: int
    post: Callable[[Callable[[], None]], None]
    neighbours: Neighbours
    _downloads: dict[str, Download] = field(default_factory=dict)  # by digest

    def fetch(self, policy: PolicyInfo, done: Done) -> None:
        chunks = Chunks(policy.digest, policy.num_bytes, self.chunk_bytes)
        self._downloads[policy.digest] = Download(policy, chunks, done)

    def cancel(self, digest: str) -> None:
        download = self._downloads.pop(digest, None)
        if download is not None:
            download.cancelled.set()
            if not download.is_aside:  # else its thread does
                download.release()

    def due_requests(self, now: float) -> list[PolicyRequest | BlobRequest]:
        return [request for each in self._downloads.values() for request in each.due_requests(now)]

    def forget_requests(self) -> None:
        """The connection is gone, and every request with it."""
        for download in self._downloads.values():
            download.forget_requests()

    def receive(self, message: PolicyOffer | BlobChunk | BlobMissing) -> None:
        """Takes in an answer of the trainer."""
        download = self._downloads.get(message.digest)
        if download is None or download.is_aside:
            return
        match message:
            case PolicyOffer() if download.offer is None:
                download.offer = message
                self._aside(download, partial(self._find, download, message))
            case BlobChunk() if download.found and (blob := download.receive(message)) is not None:
                self._aside(download, partial(self._verify, download, download.found, blob))
            case BlobMissing():
                download.release()
                self._finish(download, None)

    def _aside(self, download: Download, work: Callable[[], None]) -> None:
        download.is_aside = True
        threading.Thread(target=work, name="policy-source", daemon=True).start()

    def _find(self, download: Download, offer: PolicyOffer) -> None:
        try:
            found = self.neighbours.find(download.policy, offer, download.cancelled)
        except Exception:
            logger.exception("policy v%d comes from the trainer", download.policy.version)
            found = Found(None, self.neighbours.unshared(download.policy))
        self.post(partial(self._take_found, download, found))

    def _take_found(self, download: Download, found: Found) -> None:
        if self._downloads.get(download.policy.digest) is not download:
            found.claim.release()
            return
        download.is_aside, download.found, download.chunks_began_at = False, found, time.monotonic()
        if found.blob is not None:
            self._finish(download, download.downloaded(found.blob, is_verified=True))

    def _verify(self, download: Download, found: Found, blob: bytes) -> None:
        took_s = time.monotonic() - download.chunks_began_at
        is_verified = False  # then whoever loads it looks again
        try:
            is_verified = self.neighbours.take_from_trainer(download.policy, blob, found.claim, took_s)
        except Exception:
            logger.exception("policy v%d is not shared with others", download.policy.version)
        downloaded = download.downloaded(blob, is_verified=is_verified)
        self.post(partial(self._finish, download, downloaded))

    def _finish(self, download: Download, downloaded: DownloadedPolicy | None) -> None:
        if self._downloads.get(download.policy.digest) is download:
            del self._downloads[download.policy.digest]
            download.done(downloaded)
