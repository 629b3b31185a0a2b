"""The bundle that this trainer process gives to producers: configuration and code of the run, as they were when it started.

Guarantee: it is given only where who asks is known, by a key or by the rights of a socket's file. A run that has none goes on
without: its producers are started with configuration files of their own.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from protocol.config.functions import installed_plugin
from protocol.config.operation import is_trusted
from protocol.config.run import RunConfig
from protocol.errors import BundleError
from protocol.wire.messages import BlobChunk, BlobRequest, BundleOffer, Reject

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 8000  # of a reason; a message with a longer text could not be read


@dataclass(frozen=True)
class OfferedBundle:
    """`answer` is that to a request for the bundle. `data` is empty where there is none."""

    answer: BundleOffer | Reject
    data: bytes = b""

    @property
    def digest(self) -> str:
        return self.answer.digest if isinstance(self.answer, BundleOffer) else ""

    def chunk(self, request: BlobRequest) -> BlobChunk | None:
        """Return a part of the bundle; None for another blob, or a part beyond its end."""
        part = self.data[request.offset : request.offset + request.length] if request.digest == self.digest else b""
        return BlobChunk(request.digest, request.offset, part) if part else None


NO_BUNDLE = OfferedBundle(Reject(["this trainer has no bundle; start the producer with --config FILE"]))


def offered_bundle(config: RunConfig, folder: Path) -> OfferedBundle:
    """
    Args:
        folder: where the trainer was started.
    """
    transport, endpoints = config.transport, (config.control_endpoint, config.blob_endpoint)
    if not all(is_trusted(endpoint, has_keys=transport.keys is not None) for endpoint in endpoints):
        return _none(
            "the trainer has no keys, and gives configuration and code over TCP only to producers that it knows: set "
            "transport.keys (docs/security.md), or connect over ipc"
        )
    pack = installed_plugin("slipstream.bundles", "pack")
    if pack is None:
        return NO_BUNDLE
    try:
        data: bytes = pack(config, folder)
    except BundleError as error:
        logger.warning("producers cannot start with --connect: %s", error)
        return _none(str(error))
    digest = hashlib.sha256(data).hexdigest()
    logger.info("producers that --connect get bundle %s (%d bytes)", digest[:12], len(data))
    return OfferedBundle(
        BundleOffer(digest, len(data), transport.blob_chunk_bytes, transport.blob_endpoint or ""), data
    )


def _none(reason: str) -> OfferedBundle:
    return OfferedBundle(Reject([f"{reason[:_MOST_CHARACTERS]}. Or start this producer with --config FILE"]))
