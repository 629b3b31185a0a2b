"""A policy from one relay, as a state machine without sockets.

    asking --offer--> fetching --last chunk--> all bytes are here
       |                 |
       +-- it says that it has none, says what nobody asked for, is silent or slow --> failed, with the reason

Guarantee: it ends, by whatever the relay says or does not say: at the latest with the deadline of `Pace` for each of the two
states. It keeps nothing but the bytes of this policy. Whether they are the right ones the sha256 says, which the caller looks at.
"""

from dataclasses import dataclass, field
from typing import Literal

from producer.policies.chunks import Chunks
from producer.relays.pace import Pace
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

ASK_EVERY_S = 0.05

Failure = Literal["missing", "silent", "slow", "wrong"]


@dataclass
class RelayDownload:
    """`bytes_per_s` is what other downloads had. Times are the caller's, in seconds."""

    policy: PolicyInfo
    chunk_bytes: int
    bytes_per_s: float
    began_at: float
    blob: bytes | None = None
    _failure: Failure | None = None
    _chunks: Chunks | None = None  # once it has the policy
    _asked_at: float | None = None
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self._start_pace(self.began_at)

    @property
    def progress(self) -> int:
        """Of `num_bytes`, for those who wait for this: one half while the relay gets the policy itself, then the other."""
        if self._chunks is None:
            return self._pace.num_arrived // 2
        return (self.policy.num_bytes + self._chunks.num_arrived) // 2

    def due_requests(self, now: float) -> list[RelayRequest]:
        """What to ask the relay for now."""
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
                self._chunks = Chunks(self.policy.digest, self.policy.num_bytes, self.chunk_bytes)
                self._start_pace(now)
            case BlobChunk() if self._chunks is not None and self.blob is None:
                self.blob = self._chunks.receive(message)
                self._pace.note(self._chunks.num_arrived, now)

    def failure(self, now: float) -> Failure | None:
        """Why another source is to be asked; None: not for now."""
        return self._failure or self._pace.lateness(now)

    def _start_pace(self, now: float) -> None:
        self._pace = Pace(self.policy.num_bytes, self.chunk_bytes, self.bytes_per_s, now)
