"""One adapter blob on its way, as a state machine without sockets.

Guarantee: `receive` returns the blob exactly once, with every byte in its place, whichever chunks were lost, repeated or
reordered; what has arrived is not asked for again, also after a reconnect.
"""

from itertools import islice

from protocol.messages import BlobChunk, BlobRequest, PolicyInfo

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
        self._lengths = {
            offset: min(chunk_bytes, policy.num_bytes - offset) for offset in range(0, policy.num_bytes, chunk_bytes)
        }
        self._chunks: dict[int, bytes] = {}
        self._asked_at: dict[int, float] = {}

    def due_requests(self, now: float) -> list[BlobRequest]:
        """What to ask for now: the window's free places, and requests that stayed unanswered too long."""
        requests = []
        missing = (offset for offset in self._lengths if offset not in self._chunks)
        for offset in islice(missing, _WINDOW):
            asked_at = self._asked_at.get(offset)
            if asked_at is None or now - asked_at >= _REPEAT_AFTER_S:
                self._asked_at[offset] = now
                requests.append(BlobRequest(self.policy.digest, offset, self._lengths[offset]))
        return requests

    def forget_requests(self) -> None:
        """The connection is gone, and with it every request in flight."""
        self._asked_at.clear()

    def receive(self, chunk: BlobChunk) -> bytes | None:
        """The whole blob, when this chunk was the last one missing."""
        if chunk.digest != self.policy.digest or chunk.offset in self._chunks:
            return None
        if len(chunk.data) != self._lengths.get(chunk.offset):
            return None
        self._chunks[chunk.offset] = chunk.data
        if len(self._chunks) < len(self._lengths):
            return None
        return b"".join(self._chunks[offset] for offset in self._lengths)
