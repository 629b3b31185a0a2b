"""Sources of a policy beside the trainer's socket.

Guarantee: every policy that is found has its sha256. If there is none, the caller gets room to download it from the trainer.
"""

import logging
import threading
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from producer.metrics import PolicyCounts
from protocol.config.operation import TransportSection
from protocol.runtime.scratch import UnusableFileError, read_offered
from protocol.wire.adapter_blob import BlobError, verify
from protocol.wire.messages import PolicyInfo, PolicyOffer, RelayPeers

logger = logging.getLogger(__name__)


class Claim(Protocol):
    """The right to download a policy, for whoever shares it."""

    def room(self, num_bytes: int) -> memoryview:
        """Return where its bytes go."""
        ...

    def note(self, num_bytes: int) -> None:
        """Note that so many of them have arrived."""

    def share(self) -> None:
        """Let others have the bytes, whose sha256 was seen to match."""

    def release(self) -> None:
        """Give the right back. It may be called again."""


class Found(NamedTuple):
    """A policy, or else the right to download it."""

    blob: bytes | memoryview | None
    claim: Claim


class PolicySource(Protocol):
    """A source that a producer asks before its trainer, as the entry point `shared` of `slipstream.policy_sources` offers it.
    Methods block, and return early once `cancelled` is set."""

    transport: TransportSection
    counts: PolicyCounts

    @property
    def relay_endpoint(self) -> str:
        """Return the address at which this producer hands policies on; "" while it does not."""
        ...

    @property
    def relayed_bytes(self) -> int: ...

    def admit(self, peers: RelayPeers | None) -> None:
        """Admit the peers that the trainer names to the relay here; None admits no peer, while the trainer is away."""

    def keep(self, digest: str) -> None:
        """Keep a policy longer than its time, because others are patches of it."""

    def find(self, policy: PolicyInfo, offer: PolicyOffer, cancelled: threading.Event) -> Found:
        """Return the policy, or the right to download it."""
        ...

    def take_from_trainer(self, policy: PolicyInfo, blob: memoryview, claim: Claim, seconds: float) -> bool:
        """Verify the bytes that came from the trainer. Return False if their sha256 is wrong."""
        ...

    def unshared(self, policy: PolicyInfo) -> Claim:
        """Return room for a policy that this producer downloads for itself."""
        ...


class Room:
    """Memory of this process, which it shares with no other."""

    def room(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def note(self, num_bytes: int) -> None:
        pass

    def share(self) -> None:
        pass

    def release(self) -> None:
        pass


@dataclass
class TrainerSource:
    """A `PolicySource` that shares nothing: the trainer's file, where this host has it, and the trainer's socket."""

    transport: TransportSection
    counts: PolicyCounts = field(default_factory=PolicyCounts)
    relay_endpoint = ""
    relayed_bytes = 0

    def admit(self, peers: RelayPeers | None) -> None:
        pass

    def keep(self, digest: str) -> None:
        pass

    def find(self, policy: PolicyInfo, offer: PolicyOffer, cancelled: threading.Event) -> Found:
        return Found(from_file(policy, offer, self.counts), Room())

    def take_from_trainer(self, policy: PolicyInfo, blob: memoryview, claim: Claim, seconds: float) -> bool:
        try:
            verify(blob, policy.digest)
        except BlobError:
            return False
        self.counts.count_download("trainer")
        return True

    def unshared(self, policy: PolicyInfo) -> Claim:
        return Room()


def from_file(policy: PolicyInfo, offer: PolicyOffer, counts: PolicyCounts) -> bytes | None:
    """Return a policy from the trainer's file; None where this host does not have it, or it is another one."""
    if not offer.shared_file:
        return None
    try:
        blob = read_offered(offer.shared_file, policy.num_bytes)
        verify(blob, policy.digest)
    except (UnusableFileError, BlobError) as error:
        logger.info("policy v%d: the trainer's file cannot be used (%s); trying other sources", policy.version, error)
        return None
    counts.count_download("file")
    return blob
