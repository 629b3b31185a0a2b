"""Bytes that come in chunks, from any peer, straight into their place.

Guarantee: every byte is in its place, whichever messages were lost, repeated or reordered, and is kept once; what has arrived is
not requested again. At most `_WINDOW` chunks are on their way at a time.
"""

import math
from dataclasses import dataclass, field
from itertools import islice

from protocol.wire.messages import BlobChunk, BlobRequest

_WINDOW = 8  # requests for chunks that are on their way at a time
_REPEAT_AFTER_S = 2.0  # or the time that two windows take, where that is longer


@dataclass
class Chunks:
    """The arrival of `len(into)` bytes in the memory `into`. Times are the caller's, in seconds."""

    digest: str
    into: memoryview
    chunk_bytes: int
    num_arrived: int = 0  # bytes
    _began_at: float | None = None
    _num_seen: int = 0
    _s_per_byte: float = 0.0  # when something came last
    _asked_at: dict[int, float] = field(default_factory=dict)
    _arrived: set[int] = field(default_factory=set)  # offsets

    @property
    def is_complete(self) -> bool:
        return 0 < len(self.into) == self.num_arrived

    @property
    def _offsets(self) -> range:
        return range(0, len(self.into), self.chunk_bytes)

    def due_requests(self, now: float) -> list[BlobRequest]:
        """Return the requests that the window has room for, and those without an answer for too long."""
        self._began_at = now if self._began_at is None else self._began_at
        if self.num_arrived != self._num_seen:
            self._num_seen, self._s_per_byte = self.num_arrived, (now - self._began_at) / self.num_arrived
        repeat_after_s = max(_REPEAT_AFTER_S, 2 * _WINDOW * self.chunk_bytes * self._s_per_byte)
        missing = islice((offset for offset in self._offsets if offset not in self._arrived), _WINDOW)
        due = [offset for offset in missing if now - self._asked_at.get(offset, -math.inf) >= repeat_after_s]
        self._asked_at.update(dict.fromkeys(due, now))
        return [BlobRequest(self.digest, offset, self._length(offset)) for offset in due]

    def forget_requests(self) -> None:
        """Forget what was requested over a connection that is gone."""
        self._asked_at.clear()

    def receive(self, chunk: BlobChunk) -> bool:
        """Put a chunk in its place. Returns whether it was the last one missing."""
        if chunk.offset in self._arrived or chunk.offset not in self._offsets:
            return False
        if chunk.digest != self.digest or len(chunk.data) != self._length(chunk.offset):
            return False
        self._arrived.add(chunk.offset)
        self.into[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        self.num_arrived += len(chunk.data)
        return self.is_complete

    def _length(self, offset: int) -> int:
        return min(self.chunk_bytes, len(self.into) - offset)
