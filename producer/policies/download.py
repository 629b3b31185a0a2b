"""The newest adapter on its way, as state machines without sockets.

Guarantee: every policy announced is handed over exactly once, with its probe and every byte in its place, whichever messages
were lost, repeated or reordered, unless a newer one supersedes it, or it is refused because it does not fit the memory; what has
arrived is not asked for again, also after a reconnect.
"""

import time
from collections.abc import Callable
from itertools import islice

import psutil

from producer.interfaces import DownloadedPolicy
from producer.policies.verification import probe_of
from protocol.wire.messages import BlobChunk, BlobRequest, PolicyInfo, PolicyOffer, PolicyRequest

_WINDOW = 4  # requests in flight
_REPEAT_AFTER_S = 2.0


class BlobDownload:
    """The blob of `policy`, in chunks of `chunk_bytes`.

    Args:
        announced_at: `time.monotonic()` when the policy was announced.
    """

    def __init__(self, policy: PolicyInfo, chunk_bytes: int, announced_at: float) -> None:
        self.policy = policy
        self.announced_at = announced_at
        self._chunk_bytes = chunk_bytes
        self._offsets = range(0, policy.num_bytes, chunk_bytes)
        self._chunks: dict[int, bytes] = {}
        self._asked_at: dict[int, float] = {}

    def due_requests(self, now: float) -> list[BlobRequest]:
        """What to ask for now: the window's free places, and requests that stayed unanswered too long."""
        requests = []
        missing = (offset for offset in self._offsets if offset not in self._chunks)
        for offset in islice(missing, _WINDOW):
            asked_at = self._asked_at.get(offset)
            if asked_at is None or now - asked_at >= _REPEAT_AFTER_S:
                self._asked_at[offset] = now
                requests.append(BlobRequest(self.policy.digest, offset, self._length(offset)))
        return requests

    def forget_requests(self) -> None:
        """The connection is gone, and with it every request in flight."""
        self._asked_at.clear()

    def receive(self, chunk: BlobChunk) -> bytes | None:
        """The whole blob, when this chunk was the last one missing."""
        if chunk.digest != self.policy.digest or chunk.offset in self._chunks:
            return None
        if chunk.offset not in self._offsets or len(chunk.data) != self._length(chunk.offset):
            return None
        self._chunks[chunk.offset] = chunk.data
        if len(self._chunks) < len(self._offsets):
            return None
        return b"".join(self._chunks[offset] for offset in self._offsets)

    def _length(self, offset: int) -> int:
        return min(self._chunk_bytes, self.policy.num_bytes - offset)


def _free_memory() -> int:
    return int(psutil.virtual_memory().available)


class PolicyDownload:
    """Follows the announced policies and gets the newest: its offer first, then the file that this names, or the chunks.

    Args:
        free_memory: in bytes, now.
    """

    def __init__(self, chunk_bytes: int, free_memory: Callable[[], int] = _free_memory) -> None:
        self._chunk_bytes = chunk_bytes
        self._free_memory = free_memory
        self._announced: PolicyInfo | None = None
        self._download: BlobDownload | None = None
        self._offer: PolicyOffer | None = None
        self._offer_asked_at: float | None = None
        self._reads_file = False

    def announce(self, policy: PolicyInfo) -> str | None:
        """The newest policy; said again and again, so only a change counts. Returns why it is refused, once, if it is."""
        if policy == self._announced:
            return None
        self._announced, self._download = policy, None
        self._offer = self._offer_asked_at = None
        self._reads_file = False
        free = self._free_memory()
        if 2 * policy.num_bytes > free:  # its chunks, and what they are put together to
            return (
                f"it is {policy.num_bytes} bytes large, and taking it needs twice that: this host has {free} bytes of memory "
                "free. Give it more, or train a smaller adapter (lora.r)"
            )
        self._download = BlobDownload(policy, self._chunk_bytes, time.monotonic())
        return None

    def due_requests(self, now: float, *, knows_offers: bool = True) -> list[PolicyRequest | BlobRequest]:
        """
        Args:
            knows_offers: whether the trainer does; one of the release before does not.
        """
        if self._download is None or self._reads_file:
            return []
        if self._offer is not None or not knows_offers:
            return list(self._download.due_requests(now))
        if self._offer_asked_at is not None and now - self._offer_asked_at < _REPEAT_AFTER_S:
            return []
        self._offer_asked_at = now
        return [PolicyRequest(self._download.policy.digest)]

    def take_offer(self, offer: PolicyOffer) -> PolicyInfo | None:
        """The policy whose file is to be read now, followed by `take_file`; None if there is none."""
        if self._download is None or self._download.policy.digest != offer.digest or self._offer is not None:
            return None
        self._offer = offer
        self._reads_file = bool(offer.shared_file)
        return self._download.policy if offer.shared_file else None

    def take_file(self, digest: str, blob: bytes | None) -> DownloadedPolicy | None:
        """The policy, when `blob` is its verified content. None: the file cannot be used; chunks are."""
        if self._download is None or self._download.policy.digest != digest or not self._reads_file:
            return None
        self._reads_file = False
        return None if blob is None else self._arrive(blob, is_verified=True)

    def receive(self, chunk: BlobChunk) -> DownloadedPolicy | None:
        """The policy, when this chunk was the last one missing."""
        if self._download is None:
            return None
        blob = self._download.receive(chunk)
        if blob is None:
            return None
        return self._arrive(blob, is_verified=False)

    def _arrive(self, blob: bytes, *, is_verified: bool) -> DownloadedPolicy:
        download, self._download = self._download, None
        assert download is not None
        probe = None if self._offer is None else probe_of(self._offer)
        return DownloadedPolicy(download.policy, blob, download.announced_at, probe, is_verified)

    def give_up(self, digest: str) -> None:
        """The trainer has this blob no more; the next announcement names one that exists."""
        if self._download is not None and self._download.policy.digest == digest:
            self._announced = self._download = None

    def forget_requests(self) -> None:
        """The connection is gone, and with it every request in flight."""
        self._offer_asked_at = None
        if self._download is not None:
            self._download.forget_requests()

    def forget_policy(self) -> None:
        """Another trainer process may give the same version another meaning."""
        self._announced = self._download = None
