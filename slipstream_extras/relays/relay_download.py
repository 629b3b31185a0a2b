"""A policy from one relay, as a state machine without sockets.

    asking --offer--> fetching --last chunk--> all bytes are here
       |                 |
       +-- policy missing, bad message, silence, slowness --> failed, with the reason

Guarantee: whatever the relay sends or omits, it ends at the latest with the deadline of `Pace` for each of the two states. It
stores only the bytes of this policy, whose sha256 the caller verifies.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from producer.link.chunks import Chunks
from protocol.channel.channel import BadFrame
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobProgress,
    BlobRequest,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
    RelayMessage,
    RelayRequest,
)

PATIENCE_S = 2.0  # for connections, for a relay that has not heard of the policy yet, and for a busy machine
_PACE_SHOWS_AFTER_S = 1.0
_TIMES = 4.0  # as long as measured
_SLOWEST_BYTES_PER_S = 2.0**20  # assumed while nothing was measured, and whatever was

Lateness = Literal["silent", "slow"]


def allowed_s(num_bytes: int, bytes_per_s: float) -> float:
    """Return how many seconds `num_bytes` may take if other downloads had this rate."""
    return PATIENCE_S + _TIMES * num_bytes / bytes_per_s


@dataclass
class Rates:
    """Rates of this producer's downloads; the slowest counts. One thread at a time may note, any may read."""

    _last: deque[float] = field(default_factory=partial(deque, maxlen=8))

    def note(self, num_bytes: int, seconds: float) -> None:
        self._last.append(num_bytes / max(seconds, 1e-6))

    @property
    def bytes_per_s(self) -> float:
        return max(min(self._last, default=0.0), _SLOWEST_BYTES_PER_S)


@dataclass
class Pace:
    """Progress and deadline of a source of `num_bytes` in pieces of at most `piece_bytes`. The caller gives times, in seconds."""

    num_bytes: int
    piece_bytes: int
    bytes_per_s: float  # that others had
    began_at: float
    num_arrived: int = 0  # bytes
    _first: tuple[int, float] | None = None  # what was there when something came first, and when that was
    _progress_at: float = -math.inf

    def note(self, done: int, now: float) -> None:
        """Note how many bytes have arrived in all. A number below the last one or above `num_bytes` is no progress."""
        if self.num_arrived < done <= self.num_bytes:
            self.num_arrived, self._progress_at = done, now
            self._first = self._first or (done, now)

    def lateness(self, now: float) -> Lateness | None:
        """Return why this source should be abandoned, None if it should not."""
        if now - max(self.began_at, self._progress_at) > allowed_s(self.piece_bytes, self.bytes_per_s):
            return "silent"
        ends_at = now + self._left_s(now)
        return "slow" if ends_at - self.began_at > allowed_s(self.num_bytes, self.bytes_per_s) else None

    def _left_s(self, now: float) -> float:
        """Return the seconds left at the pace since the first bytes came; 0 while the pace is unknown."""
        if self._first is None:
            return 0.0
        done, at = self._first
        if now - at < _PACE_SHOWS_AFTER_S or self.num_arrived == done:
            return 0.0
        return (self.num_bytes - self.num_arrived) * (now - at) / (self.num_arrived - done)


ASK_EVERY_S = 0.05

Failure = Literal["missing", "silent", "slow", "wrong"]


@dataclass
class RelayDownload:
    """Fills `into`. `bytes_per_s` is the rate of other downloads. The caller gives times, in seconds."""

    policy: PolicyInfo
    into: memoryview
    chunk_bytes: int
    bytes_per_s: float
    began_at: float
    _failure: Failure | None = None
    _chunks: Chunks | None = None  # once it has the policy
    _asked_at: float | None = None
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self._start_pace(self.began_at)

    @property
    def is_complete(self) -> bool:
        return self._chunks is not None and self._chunks.is_complete

    @property
    def progress(self) -> int:
        """Return the part of `num_bytes` that is done: one half while the relay gets the policy itself, then the other."""
        if self._chunks is None:
            return self._pace.num_arrived // 2
        return (self.policy.num_bytes + self._chunks.num_arrived) // 2

    def due_requests(self, now: float) -> list[RelayRequest]:
        """Return the requests that are due to the relay."""
        if self._chunks is not None:
            return list[PolicyRequest | BlobRequest](self._chunks.due_requests(now))
        if self._asked_at is not None and now - self._asked_at < ASK_EVERY_S:
            return []
        self._asked_at = now
        return [PolicyRequest(self.policy.digest)]

    def receive(self, message: RelayMessage | BadFrame, now: float) -> None:
        match message:
            case BadFrame():
                self._failure = "wrong"
            case _ if message.digest != self.policy.digest:
                pass
            case BlobMissing():
                self._failure = "missing"
            case BlobProgress():
                self._pace.note(message.num_bytes, now)
            case PolicyOffer() if self._chunks is None:
                self._chunks = Chunks(self.policy.digest, self.into, self.chunk_bytes)
                self._start_pace(now)
            case BlobChunk() if self._chunks is not None:
                self._chunks.receive(message)
                self._pace.note(self._chunks.num_arrived, now)

    def failure(self, now: float) -> Failure | None:
        """Return why the next source should be tried, None while this one is in time."""
        return self._failure or self._pace.lateness(now)

    def _start_pace(self, now: float) -> None:
        self._pace = Pace(self.policy.num_bytes, self.chunk_bytes, self.bytes_per_s, now)
