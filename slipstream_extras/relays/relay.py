"""Hands on to producers of other hosts what the cache of this host has.

Guarantee: it serves only policies whose sha256 was verified, to at most `MAX_DOWNLOADS` producers at a time. With keys it serves
only producers that the trainer names, while the trainer is connected. It stores nothing that peers send. One producer of a host
relays, because one has the port; when it ends, another takes the port.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.channel.authenticator import GrantedKeys
from protocol.channel.channel import BadFrame, own_address
from protocol.channel.keys import SecretKey
from protocol.channel.server import ServerKeys, ZmqRelay
from protocol.config.operation import TransportSection, is_loopback
from protocol.errors import ConfigError, EndpointInUseError
from protocol.runtime.logs import Throttle
from protocol.wire.codec import CodecError
from protocol.wire.messages import (
    BlobChunk,
    BlobMissing,
    BlobProgress,
    BlobRequest,
    PolicyOffer,
    PolicyRequest,
    RelayMessage,
    RelayPeer,
    RelayRequest,
)
from slipstream_extras.relays.host_cache import HostCache


class RelayPlace(NamedTuple):
    """Endpoint that the relay binds, and the one that it advertises."""

    bound: str
    advertised: str


def relay_place(transport: TransportSection, trainer: str) -> RelayPlace:
    """Return the relay's endpoints for `transport.relay_port`; `trainer` is the trainer's endpoint. Raises ConfigError if the
    address at which others reach this host is unknown."""
    host = transport.relay_host or (_address_towards(trainer) if transport.keys else "127.0.0.1")
    advertised = f"tcp://{host}:{transport.relay_port}"
    if is_loopback(advertised):
        return RelayPlace(advertised.replace("localhost", "127.0.0.1"), advertised)
    return RelayPlace(f"tcp://{'[::]' if host.startswith('[') else '*'}:{transport.relay_port}", advertised)


def _address_towards(trainer: str) -> str:
    if trainer.startswith("ipc://"):
        return "127.0.0.1"
    host = trainer.removeprefix("tcp://").rpartition(":")[0]
    try:
        own = own_address(host.strip("[]"))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"this host has no route to {host} ({why}); set transport.relay_host to the address of this host"
        ) from error
    if "%" in own:
        raise ConfigError(
            f"{own} is valid on its link only; set transport.relay_host to an address of this host that others reach"
        )
    return f"[{own}]" if ":" in own else own


logger = logging.getLogger(__name__)

MAX_DOWNLOADS = 8
_DOWNLOAD_ENDS_S = 5.0  # without a request
_TICK_S = 0.2
_BIND_EVERY_S = 5.0


@dataclass
class Downloads:
    """The producers that download now, by name: each blob comes over a connection of its own. The caller gives times, in
    seconds."""

    _asked_at: dict[bytes, float] = field(default_factory=dict)

    def admit(self, peer: bytes, now: float) -> bool:
        """Note a request. Returns False if `MAX_DOWNLOADS` others are served."""
        name = peer.partition(b"/")[0]
        self._asked_at = {one: at for one, at in self._asked_at.items() if now - at < _DOWNLOAD_ENDS_S}
        if name not in self._asked_at and len(self._asked_at) >= MAX_DOWNLOADS:
            return False
        self._asked_at[name] = now
        return True


class Relay(threading.Thread):
    """Thread that serves policies to producers of other hosts. Start it once; `stop` ends it. `endpoint` is its address, "" while
    it has none. `place` returns the address to use, or raises ConfigError while that is unknown."""

    def __init__(
        self, cache: HostCache, place: Callable[[], RelayPlace], max_message_bytes: int, secret: SecretKey | None
    ) -> None:
        super().__init__(name="relay", daemon=True)
        self._cache = cache
        self._place = place
        self._max_message_bytes = max_message_bytes
        self._keys = ServerKeys(secret, GrantedKeys()) if secret else None
        self._downloads = Downloads()
        self._stopping = threading.Event()
        self._say = Throttle(logger, num_at_once=1)
        self.endpoint = ""
        self.num_bytes = 0  # handed on

    def admit_only(self, peers: Iterable[RelayPeer]) -> None:
        """Let only these peers connect from now on, and shut the others' connections. Without keys this has no effect."""
        if self._keys is not None:
            assert isinstance(self._keys.authorized, GrantedKeys)
            self._keys.authorized.grant({peer.key.encode(): peer.identity for peer in peers})

    def stop(self) -> None:
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._relay()
            except EndpointInUseError:
                self._say(
                    "bind",
                    "port transport.relay_port is in use; assuming that another producer of this host is the relay",
                    logging.INFO,
                )
            except ConfigError as error:
                self._say("bind", f"this host does not relay policies (transport.relay_port): {error}")
            except Exception:
                logger.exception("the relay failed and restarts")
            self._stopping.wait(_BIND_EVERY_S)

    def _relay(self) -> None:
        """Serve until `stop`."""
        place = self._place()
        with closing(ZmqRelay(place.bound, self._max_message_bytes, self._keys)) as server:
            logger.info("relaying policies to other hosts at %s", place.advertised)
            try:
                self.endpoint = place.advertised
                while not self._stopping.is_set():
                    self._serve(server)
            finally:
                self.endpoint = ""

    def _serve(self, server: ZmqRelay) -> None:
        for peer, request in server.poll(_TICK_S):
            if isinstance(request, BadFrame):
                continue
            answer = self._answer(peer, request)
            try:
                if server.send(peer, answer) and isinstance(answer, BlobChunk):
                    self.num_bytes += len(answer.data)
            except CodecError:  # it asks for more at once than our max_message_bytes allows
                server.send(peer, BlobMissing(request.digest))

    def _answer(self, peer: bytes, request: RelayRequest) -> RelayMessage:
        digest = request.digest
        if isinstance(request, PolicyRequest) and not self._cache.has(digest):
            state = self._cache.progress(digest)
            return BlobMissing(digest) if state is None else BlobProgress(digest, max(0, state.num_bytes))
        if not self._downloads.admit(peer, time.monotonic()):
            return BlobMissing(digest)
        if isinstance(request, BlobRequest):
            data = self._cache.chunk(digest, request.offset, request.length)
            return BlobChunk(digest, request.offset, data) if data else BlobMissing(digest)
        return PolicyOffer(digest)
