"""The messages by which policies travel: from the trainer, or from a relay, which is a producer that hands them on.

Guarantee: that of `protocol.wire.messages`, which has all the others.
"""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=2**53)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Version = Annotated[int, Meta(ge=0, le=2**31)]
MAX_RELAYS = 8  # that are named for one policy

RelayEndpoint = Annotated[str, Meta(max_length=256, pattern=r"^(tcp://[A-Za-z0-9.:_\[\]-]+:[0-9]{1,5})?\Z")]
CurveKey = Annotated[str, Meta(pattern=r"^[!-~]{40}\Z")]  # public, in Z85

LARGEST_POLICY_BYTES = 2**40
"""No adapter is nearly as large. A producer that takes one also looks at its memory."""


class PolicyInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """A published policy. `digest` names the adapter blob: it is the sha256 of its `num_bytes` bytes."""

    version: Version
    digest: Sha256
    num_bytes: Annotated[int, Meta(ge=0, le=LARGEST_POLICY_BYTES)]


class PolicyRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="policy_request"):
    """Asks how to fetch and verify the policy of this digest. The answer is its offer, or `BlobMissing`."""

    digest: Sha256


class RelayAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """A producer that hands policies on, and the public key that it has (None: there are no keys)."""

    endpoint: RelayEndpoint
    key: CurveKey | None = None


class PolicyOffer(Struct, frozen=True, forbid_unknown_fields=True, tag="policy_offer"):
    """`shared_file` holds the blob for producers of the same host ("": there is none). The probe proves the swap:
    `probe_ids` int32 (K,) are tokens, `probe_logprobs` float32 (K - 1,) the trainer's log-probs, under this policy and
    temperature 1, of each but the first. Both are empty for a policy that is not probed. `relays` hand the blob on and are
    asked before the trainer, in this order; a relay's own offer says only that it has the blob."""

    digest: Sha256
    shared_file: Annotated[str, Meta(max_length=4096)] = ""
    probe_ids: Annotated[bytes, Meta(max_length=4096)] = b""
    probe_logprobs: Annotated[bytes, Meta(max_length=4096)] = b""
    relays: Annotated[list[RelayAddress], Meta(max_length=MAX_RELAYS)] = []


class BlobRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_request"):
    digest: Sha256
    offset: Count
    length: Annotated[int, Meta(ge=1, le=2**26)]


class BlobChunk(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_chunk"):
    digest: Sha256
    offset: Count
    data: bytes


class BlobMissing(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_missing"):
    """The trainer no longer keeps this blob; the producer asks for the newest policy instead."""

    digest: Sha256


class BlobProgress(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_progress"):
    """A relay's answer while it does not have the blob: `num_bytes` of it have arrived there so far."""

    digest: Sha256
    num_bytes: Count


class RelayPeer(Struct, frozen=True, forbid_unknown_fields=True):
    """The owner of a public key."""

    identity: Annotated[str, Meta(min_length=1, max_length=64)]
    key: CurveKey


class RelayPeers(Struct, frozen=True, forbid_unknown_fields=True, tag="relay_peers"):
    """Tells a relay who may connect to it, in place of those named before."""

    peers: Annotated[list[RelayPeer], Meta(max_length=65_536)]


RelayMessage = PolicyOffer | BlobProgress | BlobChunk | BlobMissing
RelayRequest = PolicyRequest | BlobRequest

BLOB_MESSAGES = (PolicyRequest, PolicyOffer, BlobRequest, BlobProgress, BlobChunk, BlobMissing)
"""Messages that travel on their own socket, so that a large adapter never delays a lease or an acknowledgement."""
