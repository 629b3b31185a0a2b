"""One version of the policy, as it goes from the trainer's weights to the producers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from protocol.wire.messages import PolicyInfo


class MeasuredProbe(NamedTuple):
    """The tokens of a probe and their log-probs, as a `PolicyOffer` has them."""

    token_ids: bytes
    logprobs: bytes


NO_PROBE = MeasuredProbe(b"", b"")


@dataclass(frozen=True)
class PublishedPolicy:
    """A packed adapter with what proves that it arrived.

    Args:
        digest: sha256 of `data` in hex.
        release: is called when `data` is not needed any more.
    """

    version: int
    digest: str
    data: bytes | memoryview
    probe: MeasuredProbe = NO_PROBE
    release: Callable[[], None] = lambda: None

    @property
    def info(self) -> PolicyInfo:
        return PolicyInfo(self.version, self.digest, len(self.data))
