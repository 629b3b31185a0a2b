"""Downloads of policies: which of them, for what, and from the offer to verified bytes.

Guarantee: every policy that is announced is handed over exactly once, unless a newer one supersedes it or it does not fit the
memory, and again after `forget_announcement`; a policy that is requested is answered, with its bytes or with None. A download
that serves both purposes runs once. Its thread tries the sources in their order, the trainer last, whatever is wrong with the
others. Its bytes are kept once: in a file of the host's cache, or in memory. The anchor of a patch is fetched before the patch as
a policy is, and not again while the newest patches have the same one; nor at all if it was the newest policy before them. No
newer policy ends the download of an anchor.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import psutil

from producer.link.chunks import Chunks
from producer.link.events import LinkEvent, PolicyArrived, PolicyFetched, PolicyRefused
from producer.link.policy_source import Found, PolicySource
from producer.policies.loader import DownloadedPolicy
from producer.policies.probe import probe_of
from protocol.wire.adapter_blob import Anchor
from protocol.wire.messages import BlobChunk, BlobMissing, PolicyInfo, PolicyOffer, PolicyRequest

logger = logging.getLogger(__name__)

Purpose = Literal["newest", "evaluation"]
Answer = PolicyOffer | BlobChunk | BlobMissing
Reconnected = Literal["reconnected"]

_REPEAT_AFTER_S = 2.0
_TICK_S = 0.05
_MAX_WAITING = 64  # answers of the trainer; what it sends beyond them is requested again


class Fetcher:
    """Belongs to the link's thread. `post` takes a request for the trainer, or has the link's thread call a function; it may be
    used by any thread. `emit` tells what was downloaded, or why it cannot be."""

    def __init__(
        self,
        sources: PolicySource,
        post: Callable[[Any], None],
        emit: Callable[[LinkEvent], object],
        free_memory: Callable[[], int] = lambda: psutil.virtual_memory().available,
        *,
        takes_patches: bool = False,
    ) -> None:
        self.sources = sources
        self.post = post
        self.is_connected = False
        self.takes_patches = takes_patches
        self._emit = emit
        self._free_memory = free_memory
        self._announced: PolicyInfo | None = None
        self._downloads: dict[str, _Download] = {}  # by digest
        self.anchor: Anchor | None = None  # of the newest patch, or that patch, which has none

    def announce(self, policy: PolicyInfo) -> None:
        """Fetch the trainer's newest policy. It is announced again and again, and only a change has an effect, and none while an
        anchor arrives: the newer policy probably has the same one."""
        if policy == self._announced or any(download.awaits_anchor for download in self._downloads.values()):
            return
        self._announced = policy
        if (problem := self._begin("newest", policy)) is not None:
            self._refuse("newest", policy, problem)

    def forget_announcement(self, policy: PolicyInfo) -> None:
        """Let the next announcement of this policy begin a download, although it was announced before."""
        if policy == self._announced:
            self._announced = None

    def request(self, policy: PolicyInfo) -> None:
        """Fetch a policy that is to be evaluated, in place of the one requested before."""
        download = self._downloads.get(policy.digest)
        if download is not None and download.purposes.get("evaluation") == policy:
            return
        if (problem := self._begin("evaluation", policy)) is not None:
            self._refuse("evaluation", policy, problem)

    def _refuse(self, purpose: Purpose, policy: PolicyInfo, problem: str) -> None:
        if purpose == "newest":
            self._emit(PolicyRefused(policy, problem))
        else:
            logger.error("policy v%d cannot be evaluated here: %s", policy.version, problem)
            self._emit(PolicyFetched(policy, None))

    def forget(self) -> None:
        """End all downloads: another trainer process may give the same version another meaning, and who requested a policy
        requests it again."""
        self._announced = None
        for download in self._downloads.values():
            download.cancel()
        self._downloads.clear()

    def receive(self, answer: Answer) -> None:
        """Hand an answer of the trainer to its download."""
        for download in self._downloads.values():
            if download.wanted == answer.digest:
                download.put(answer)

    def note_connection(self, is_connected: bool) -> None:
        """Note that the connection is gone, with every request over it, or that there is a new one."""
        self.is_connected = is_connected
        if is_connected:
            for download in self._downloads.values():
                download.put("reconnected")

    def _begin(self, purpose: Purpose, policy: PolicyInfo) -> str | None:
        """Return why the policy cannot be downloaded, or None."""
        for digest, download in list(self._downloads.items()):
            if download.purposes.pop(purpose, None) is not None and not download.purposes and digest != policy.digest:
                download.cancel()
                del self._downloads[digest]
        if policy.digest not in self._downloads:
            if (problem := self.problem_of(policy.num_bytes)) is not None:
                return problem
            self._downloads[policy.digest] = _Download(self, policy)
            self._downloads[policy.digest].start()
        self._downloads[policy.digest].purposes[purpose] = policy
        return None

    def problem_of(self, num_bytes: int) -> str | None:
        """Return why a policy of this size cannot be taken, or None. Any thread may call it."""
        free = self._free_memory()
        if 2 * num_bytes <= free:  # for its bytes as they arrive and for its unpacked files
            return None
        return (
            f"it is {num_bytes} bytes large, and taking it needs twice that: this host has {free} bytes of memory free. Give it "
            "more, or train a smaller adapter (lora.r)"
        )

    def finish(self, download: "_Download", downloaded: DownloadedPolicy | str | None) -> None:
        """End a download, on the link's thread. A text says why the policy cannot be taken here; None: the trainer does not have
        it."""
        if self._downloads.get(download.policy.digest) is not download:
            return
        del self._downloads[download.policy.digest]
        for purpose, policy in download.purposes.items():
            if isinstance(downloaded, str):
                self._refuse(purpose, policy, downloaded)
                continue
            found = downloaded and downloaded._replace(policy=policy)
            if purpose == "evaluation":
                self._emit(PolicyFetched(policy, found))
            elif found is not None:
                self._emit(PolicyArrived(found))
            else:
                self._announced = None  # the next announcement names a policy that exists


class _Cancelled(Exception):  # noqa: N818 - ends a thread without a result
    pass


class _Download(threading.Thread):
    """A download of one policy: its offer, then its anchor, then one source after the other. `wanted` is the digest of the blob
    that it asks for now."""

    def __init__(self, fetcher: Fetcher, policy: PolicyInfo) -> None:
        super().__init__(name="fetch", daemon=True)
        self.policy = policy
        self.wanted = policy.digest
        self.purposes: dict[Purpose, PolicyInfo] = {}
        self._fetcher = fetcher
        self._announced_at = time.monotonic()
        self._cancelled = threading.Event()
        self._answers: queue.Queue[Answer | Reconnected] = queue.Queue(_MAX_WAITING)

    @property
    def awaits_anchor(self) -> bool:
        """Return whether it is of the newest policy, and has not come to that itself."""
        return "newest" in self.purposes and self.wanted != self.policy.digest

    def put(self, answer: Answer | Reconnected) -> None:
        try:
            self._answers.put_nowait(answer)
        except queue.Full:
            logger.debug("policy v%d: an answer of the trainer is dropped", self.policy.version)

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        try:
            downloaded = self._fetch()
        except _Cancelled:
            return
        except Exception as error:
            self._fetcher.post(partial(_raise, error))
            return
        self._fetcher.post(partial(self._fetcher.finish, self, downloaded))

    def _fetch(self) -> DownloadedPolicy | str | None:
        policy, anchor = self.policy, None
        offer = self._offer(policy)
        if offer is None:
            return None
        if offer.anchor is not None:
            if (problem := self._fetcher.problem_of(policy.num_bytes + offer.anchor.num_bytes)) is not None:
                return problem
            anchor = self._anchor(offer.anchor)
            if anchor is None:
                return None
            self._fetcher.sources.keep(anchor.digest)
        found = self._blob(policy, offer)
        if found is None:
            return None
        blob, is_verified = found
        if anchor is None and self._fetcher.takes_patches:
            self._keep(Anchor(policy.digest, blob), is_verified)
        return DownloadedPolicy(policy, blob, self._announced_at, probe_of(offer), is_verified, anchor)

    def _anchor(self, policy: PolicyInfo) -> Anchor | None:
        """Return the anchor of this policy; None if the trainer does not have it. One that is not what it should be is refused by
        the loader."""
        kept = self._fetcher.anchor
        if kept is not None and kept.digest == policy.digest:
            return kept
        offer = self._offer(policy)
        found = self._blob(policy, offer) if offer is not None else None
        if found is None:
            return None
        blob, is_verified = found
        return self._keep(Anchor(policy.digest, blob), is_verified)

    def _keep(self, anchor: Anchor, is_verified: bool) -> Anchor:
        if is_verified and "newest" in self.purposes:  # one that is evaluated may be older
            self._fetcher.anchor = anchor
        return anchor

    def _offer(self, policy: PolicyInfo) -> PolicyOffer | None:
        """Ask the trainer for its offer of this policy; None if it does not have it."""
        self.wanted, asked_at = policy.digest, -math.inf
        while True:
            now = time.monotonic()
            if now - asked_at >= _REPEAT_AFTER_S:
                asked_at = now
                self._fetcher.post(PolicyRequest(policy.digest))
            match self._next():
                case PolicyOffer() as offer:
                    return offer
                case BlobMissing():
                    return None
                case "reconnected":
                    asked_at = -math.inf

    def _blob(self, policy: PolicyInfo, offer: PolicyOffer) -> tuple[bytes | memoryview, bool] | None:
        """Return the bytes of a policy, and whether their sha256 was seen to match; None if no source has them."""
        sources, self.wanted = self._fetcher.sources, policy.digest
        try:
            found = sources.find(policy, offer, self._cancelled)
        except Exception:
            logger.exception("other sources of policy v%d failed; downloading it from the trainer", policy.version)
            found = Found(None, sources.unshared(policy))
        try:
            if found.blob is not None:
                return found.blob, True
            began = time.monotonic()
            blob = self._from_trainer(policy, found)
            if blob is None:
                return None
            # Where it is false, the loader looks at the sha256 again and refuses the policy with the reason.
            return blob, sources.take_from_trainer(policy, blob, found.claim, time.monotonic() - began)
        finally:
            found.claim.release()

    def _from_trainer(self, policy: PolicyInfo, found: Found) -> memoryview | None:
        """The policy in chunks from the trainer; None: it does not have it any more."""
        into = found.claim.room(policy.num_bytes)
        chunks = Chunks(policy.digest, into, self._fetcher.sources.transport.blob_chunk_bytes)
        while not chunks.is_complete:
            for request in chunks.due_requests(time.monotonic()):
                self._fetcher.post(request)
            match self._next():
                case BlobChunk() as chunk:
                    chunks.receive(chunk)
                case BlobMissing():
                    return None
                case "reconnected":
                    chunks.forget_requests()
            if self._fetcher.is_connected:  # else producers of this host must not wait for this one
                found.claim.note(chunks.num_arrived)
        return into

    def _next(self) -> Answer | Reconnected | None:
        """The next answer; None: there is none yet."""
        answer = None
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=_TICK_S)
        if self._cancelled.is_set():
            raise _Cancelled
        if answer is None or answer == "reconnected" or answer.digest == self.wanted:
            return answer
        return None


def _raise(error: Exception) -> None:
    raise error
