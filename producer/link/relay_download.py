"""A policy from one relay, as a state machine without sockets.

    asking --offer--> fetching --last chunk--> all bytes are here
       |                 |
       +-- it says that it has none, says what nobody asked for, is silent or slow --> failed, with the reason

Guarantee: it ends, by whatever the relay says or does not say: at the latest with the deadline of `Pace` for each of the two
states. It keeps nothing but the bytes of this policy. Whether they are the right ones the sha256 says, which the caller looks at.
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
    """How long so many bytes may take, where others came at this rate."""
    return PATIENCE_S + _TIMES * num_bytes / bytes_per_s


@dataclass
class Rates:
    """Rates of this producer's downloads, of which the slowest counts. One thread at a time may note, any may read."""

    _last: deque[float] = field(default_factory=partial(deque, maxlen=8))

    def note(self, num_bytes: int, seconds: float) -> None:
        self._last.append(num_bytes / max(seconds, 1e-6))

    @property
    def bytes_per_s(self) -> float:
        return max(min(self._last, default=0.0), _SLOWEST_BYTES_PER_S)


@dataclass
class Pace:
    """Progress and deadline of a source of `num_bytes` in pieces of at most `piece_bytes`. Times are the caller's, in seconds."""

    num_bytes: int
    piece_bytes: int
    bytes_per_s: float  # that others had
    began_at: float
    num_arrived: int = 0  # bytes
    _first: tuple[int, float] | None = None  # what was there when something came first, and when that was
    _progress_at: float = -math.inf

    def note(self, done: int, now: float) -> None:
        """Note how many bytes are there in all. Fewer than before, or more than there can be, are no progress."""
        if self.num_arrived < done <= self.num_bytes:
            self.num_arrived, self._progress_at = done, now
            self._first = self._first or (done, now)

    def lateness(self, now: float) -> Lateness | None:
        """Why this source is to be left; None: it is not."""
        if now - max(self.began_at, self._progress_at) > allowed_s(self.piece_bytes, self.bytes_per_s):
            return "silent"
        ends_at = now + self._left_s(now)
        return "slow" if ends_at - self.began_at > allowed_s(self.num_bytes, self.bytes_per_s) else None

    def _left_s(self, now: float) -> float:
        """At the pace since something came first; 0 as long as nobody can tell."""
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
    """Fills `into`. `bytes_per_s` is the rate of other downloads. Times are the caller's, in seconds."""

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
        """Why another source is to be asked; None: not for now."""
        return self._failure or self._pace.lateness(now)

    def _start_pace(self, now: float) -> None:
        self._pace = Pace(self.policy.num_bytes, self.chunk_bytes, self.bytes_per_s, now)
