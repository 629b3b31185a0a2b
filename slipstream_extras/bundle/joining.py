"""Asks the trainer for the run's bundle, before this producer has a configuration.

Guarantee: the bytes that are returned have the digest that the trainer named. A trainer that is not there yet is waited for,
visibly, and not for ever; one that refuses says why.
"""

import contextlib
import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from producer.link.chunks import Chunks
from producer.link.session import Connection
from protocol.channel.channel import BadFrame
from protocol.channel.client import ZmqClient
from protocol.channel.keys import process_name
from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.errors import BundleError, ConfigError, IncompatiblePeerError, NoAnswerError
from protocol.runtime.scratch import scratch_folder
from protocol.wire.messages import BlobChunk, BlobMissing, BundleOffer, BundleRequest, Reject, TrainerMessage
from slipstream_extras.bundle.bundle import (
    CONFIG_FILE,
    Bundle,
    check_size,
    decode,
    differing,
    digest_of,
    missing,
    unpack,
)
from slipstream_extras.bundle.trainer_address import TrainerAddress, trainer_address

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
    """A fetch of the trainer's bundle. `name` is this producer's, and `wait_s` is how long the trainer may make no progress.

    Raises:
        NoAnswerError: no trainer answered in that time.
        BundleError: the trainer has no bundle for this producer, or sent another than it named.
        IncompatiblePeerError: the trainer's release has no bundles.
    """

    name: str
    address: TrainerAddress
    wait_s: float
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
        """Return the bundle; None if the trainer has another one by now."""
        data = bytearray(offer.num_bytes)
        chunks = Chunks(offer.digest, memoryview(data), min(offer.chunk_bytes, _CHUNK_BYTES))
        while True:
            for request in chunks.due_requests(time.monotonic()):
                channel.send(request)
            for message in self._heard(channel):
                match message:
                    case BlobChunk(offer.digest) if chunks.receive(message):
                        if digest_of(bytes(data)) != offer.digest:
                            raise BundleError(
                                f"the bundle that came from {self.address.endpoint} has another digest than the trainer named "
                                f"({offer.digest[:12]}); it is not used. Restart the trainer"
                            )
                        return bytes(data)
                    case BlobMissing(offer.digest):
                        return None

    def _heard(self, channel: ZmqClient) -> list[TrainerMessage]:
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


@contextlib.contextmanager
def joined(arguments: Namespace) -> Iterator[tuple[RunConfig, str]]:
    """The configuration, and the digest of the bundle that it is from. Raises SlipstreamError for whatever keeps this host from
    joining the run.

    Args:
        arguments: `connect`, `keys`, `model`, `wait` and `overrides` are read.
    """
    model = [] if arguments.model is None else [f"model.path={_quoted(_model_folder(arguments.model))}"]
    address = trainer_address(arguments.connect, arguments.keys, arguments.overrides)
    fetched = BundleFetch(process_name(address.keys), address, arguments.wait).run()
    bundle = decode(fetched.data)
    overrides = [*model, *(_from_here(override, bundle) for override in arguments.overrides)]
    _check_host_keys(bundle, overrides)
    with scratch_folder() as scratch:
        files = scratch / "files"
        files.mkdir()
        unpack(bundle, files)
        config = load_config(str(files / CONFIG_FILE), [*_of_this_host(address, fetched, scratch), *overrides])
        with contextlib.chdir(files):
            if problems := missing(bundle.requirements):
                raise BundleError("\n  ".join(["this host lacks what the run's own files import:", *problems]))
            for difference in differing(bundle.requirements):
                logger.warning("%s", difference)
            logger.info("got bundle %s from the trainer: %d files", fetched.digest[:12], len(bundle.files))
            yield config, fetched.digest


def _of_this_host(address: TrainerAddress, fetched: FetchedBundle, scratch: Path) -> list[str]:
    values: dict[str, str | None] = {
        "run_dir": str(scratch / "run"),
        "transport.keys": address.keys_folder,
        "transport.endpoint": address.endpoint,
        "transport.blob_endpoint": fetched.blob_endpoint,
    }
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _model_folder(given: str) -> str:
    folder = Path(os.path.expanduser(given)).absolute()
    if not folder.is_dir():
        raise ConfigError(f"--model {given}: there is no such folder on this host")
    return str(folder)


def _from_here(override: str, bundle: Bundle) -> str:
    """Make the path of an override absolute where the trainer's was one; a name of the hub stays."""
    key, separator, value = override.partition("=")
    if key in bundle.host_keys and value and Path(value).exists():
        return f"{key}{separator}{_quoted(os.path.abspath(value))}"
    return override


def _check_host_keys(bundle: Bundle, overrides: list[str]) -> None:
    given = {override.partition("=")[0] for override in overrides}
    absent = [key for key in bundle.host_keys if key not in given]
    if absent:
        raise ConfigError(
            "the trainer's configuration names places of its own host; give those of this host:\n  "
            + "\n  ".join("--model FOLDER" if key == "model.path" else f"--set {key}=..." for key in absent)
        )


def _quoted(value: str | None) -> str:
    """Write the value of an override, which is YAML."""
    return json.dumps(value, ensure_ascii=False)
