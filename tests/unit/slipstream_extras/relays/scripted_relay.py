"""Relays over real sockets: the product's, and ones that do as the test says."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from protocol.channel.channel import BadFrame
from protocol.channel.keys import SecretKey
from protocol.channel.server import ZmqRelay
from protocol.config.operation import TransportSection
from protocol.runtime.scratch import PREFIX
from protocol.wire.messages import (
    BlobChunk,
    BlobRequest,
    PolicyInfo,
    PolicyOffer,
    RelayAddress,
    RelayMessage,
    RelayRequest,
)
from slipstream_extras.relays.host_cache import HostCache
from slipstream_extras.relays.relay import Relay, RelayPlace
from slipstream_extras.relays.sources import PolicySources
from tests.unit.protocol.channel_harness import reserve_port

BLOB = bytes(range(256)) * 64
POLICY = PolicyInfo(3, hashlib.sha256(BLOB).hexdigest(), len(BLOB))
TRANSPORT = TransportSection(blob_chunk_bytes=1024, max_message_bytes=65_536)
PATIENCE_S = 30.0

Answer = Callable[[RelayRequest], RelayMessage | None]


def made_cache(root: Path, name: str) -> HostCache:
    """As a host has one."""
    folder = root / f"{PREFIX}{name}"
    folder.mkdir()
    return HostCache(folder)


def store(cache: HostCache, blob: bytes = BLOB) -> None:
    claim = cache.claim(hashlib.sha256(blob).hexdigest())
    assert claim is not None
    claim.room(len(blob))[:] = blob
    claim.share()
    claim.release()


def neighbours(cache: HostCache, name: str = "child-1-aa", secret: SecretKey | None = None) -> PolicySources:
    return PolicySources(name, TRANSPORT, secret, cache)


@contextmanager
def relaying(cache: HostCache, secret: SecretKey | None = None) -> Iterator[tuple[Relay, str]]:
    """The product's relay, and its endpoint."""
    with ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{reserve_port(stack)}"
        relay = Relay(cache, lambda: RelayPlace(endpoint, endpoint), 65_536, secret)
        stack.callback(relay.stop)
        relay.start()
        yield relay, endpoint


def honest(request: RelayRequest) -> RelayMessage:
    if isinstance(request, BlobRequest):
        return BlobChunk(request.digest, request.offset, BLOB[request.offset : request.offset + request.length])
    return PolicyOffer(request.digest)


@contextmanager
def scripted(answer: Answer) -> Iterator[RelayAddress]:
    """A relay that says what `answer` does, nothing for None, and dies when that raises EOFError."""
    ended = threading.Event()

    def serve() -> None:
        with closing(server):
            while not ended.is_set():
                for peer, request in server.poll(0.05):
                    try:
                        message = None if isinstance(request, BadFrame) else answer(request)
                    except EOFError:
                        return
                    if message is not None:
                        server.send(peer, message)

    with ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{reserve_port(stack)}"
        server = ZmqRelay(endpoint, 65_536, None)
        thread = threading.Thread(target=serve)
        stack.callback(thread.join)
        stack.callback(ended.set)
        thread.start()
        yield RelayAddress(endpoint)
