"""One version of the policy, as it goes from the trainer's weights to the producers.

Guarantee: nothing here knows torch, so that only what takes the weights needs it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protocol.wire.messages import PolicyInfo


class MeasuredProbe(NamedTuple):
    """The tokens of a probe and their log-probs, as a `PolicyOffer` has them."""

    token_ids: bytes
    logprobs: bytes


NO_PROBE = MeasuredProbe(b"", b"")


@dataclass(frozen=True)
class PublishedPolicy:
    """A packed adapter with what proves that it arrived."""

    version: int
    digest: str  # sha256 of `data` in hex
    data: bytes | memoryview
    probe: MeasuredProbe = NO_PROBE
    release: Callable[[], None] = lambda: None  # is called when `data` is not needed any more

    @property
    def info(self) -> PolicyInfo:
        return PolicyInfo(self.version, self.digest, len(self.data))


class Snapshot(Protocol):
    """The weights of a moment, perhaps still on their way to host memory. It belongs to its taker until `release`."""

    @property
    def release(self) -> Callable[[], None]: ...

    def published(self, version: int) -> PublishedPolicy:
        """As the policy of this version, which releases this. Waits until everything is there."""
