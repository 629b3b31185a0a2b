"""Asks the trainer for the run's bundle, before this producer has a configuration.

Guarantee: the bytes that are returned have the digest that the trainer named. A trainer that is not there yet is waited for,
visibly, and not for ever; one that refuses says why.
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from producer.joining.address import TrainerAddress
from producer.link.connection import Connection
from producer.policies.chunks import Chunks
from protocol.bundle.bundle import check_size, digest_of
from protocol.channel.channel import BadFrame
from protocol.channel.client import ZmqClient
from protocol.errors import BundleError, ExitCode, IncompatiblePeerError, NoAnswerError
from protocol.wire.messages import BlobChunk, BlobMissing, BundleOffer, BundleRequest, Reject, TrainerMessage

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_ANSWER_S = 6.0
_CHUNK_BYTES = 2**20
_MAX_MESSAGE_BYTES = 2 * _CHUNK_BYTES


@dataclass(frozen=True)
class FetchedBundle:
    data: bytes
    digest: str
    blob_endpoint: str


@dataclass
class BundleFetch:
    """One fetch. `name` is this producer's, `wait_s` how long the trainer may make no progress, and `must_stop` says whether
    this process was asked to stop.

    Raises:
        SystemExit: it was, with code 0.
        NoAnswerError: nobody answered in that time.
        BundleError: the trainer has no bundle for this producer, or sent another than it named.
        IncompatiblePeerError: the trainer's release has no bundles.
    """

    name: str
    address: TrainerAddress
    wait_s: float
    must_stop: Callable[[], bool]
    _heard_at: float = field(default_factory=time.monotonic)

    def run(self) -> FetchedBundle:
        blob_endpoint = self.address.blob_endpoint("")
        connection = Connection(self.address.endpoint, _ANSWER_S)
        connection.await_trainer(time.monotonic())
        while True:
            endpoints = (self.address.endpoint, blob_endpoint)
            with closing(ZmqClient(self.name, *endpoints, _MAX_MESSAGE_BYTES, self.address.keys)) as channel:
                offer = self._offer(channel, connection)
                self.address.check_owner()
                check_size(offer.num_bytes)
                wanted = self.address.blob_endpoint(offer.blob_endpoint)
                data = self._download(channel, offer) if wanted == blob_endpoint else None
            if data is not None:
                return FetchedBundle(data, offer.digest, blob_endpoint)
            blob_endpoint = wanted

    def _offer(self, channel: ZmqClient, connection: Connection) -> BundleOffer:
        connection.hello_at = None
        while True:
            now = time.monotonic()
            connection.remind(now)
            if connection.hello_unanswered(now):
                channel.reset()
                connection.start_over(now)
            if connection.hello_due(now) and channel.send(BundleRequest()):
                connection.hello_at = now
            for message in self._heard(channel):
                match message:
                    case BundleOffer():
                        return message
                    case Reject(problems):
                        raise BundleError("\n  ".join(["the trainer gives this producer no bundle:", *problems]))

    def _download(self, channel: ZmqClient, offer: BundleOffer) -> bytes | None:
        """None if the trainer has another bundle by now."""
        blob = Chunks(offer.digest, offer.num_bytes, min(offer.chunk_bytes, _CHUNK_BYTES))
        while True:
            for request in blob.due_requests(time.monotonic()):
                channel.send(request)
            for message in self._heard(channel):
                match message:
                    case BlobChunk(offer.digest) if (data := blob.receive(message)) is not None:
                        if digest_of(data) != offer.digest:
                            raise BundleError(
                                f"the bundle that came from {self.address.endpoint} has another digest than the trainer named "
                                f"({offer.digest[:12]}); it is not used. Restart the trainer"
                            )
                        return data
                    case BlobMissing(offer.digest):
                        return None

    def _heard(self, channel: ZmqClient) -> list[TrainerMessage]:
        if self.must_stop():
            raise SystemExit(ExitCode.OK)
        messages: list[TrainerMessage] = []
        for message in channel.poll(_TICK_S):
            if not isinstance(message, BadFrame):
                messages.append(message)
            elif message.peer_schema is not None:
                raise IncompatiblePeerError(f"{message.reason}: install the same release of slipstream on both sides")
        now = time.monotonic()
        if messages:
            self._heard_at = now
        elif now - self._heard_at > self.wait_s:
            why = f": it {channel.problem}" if channel.problem else "; compare the address with the trainer's log"
            raise NoAnswerError(f"no trainer has answered at {self.address.endpoint} for {self.wait_s:g} s{why}")
        return messages
