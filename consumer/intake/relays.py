"""What the trainer tells producers about relays: which to ask for a policy, and whom to let in.

Guarantee: a relay is named with the key of the identity that its producer connected with, whatever it says of itself; without
keys only relays on loopback are named. A relay learns who is authorized before anybody is sent to it, and of every change within
a fraction of a second. Belongs to the intake's thread.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from consumer.intake.sessions import ProducerSession
from consumer.publishing.relay_tree import Host, sources
from protocol.channel.channel import ServerChannel
from protocol.channel.keys import identity_of
from protocol.config.operation import is_loopback
from protocol.runtime.logs import Throttle
from protocol.wire.codec import CodecError
from protocol.wire.messages import PolicyOffer, RelayAddress, RelayPeer, RelayPeers

logger = logging.getLogger(__name__)

_EVERY_S = 0.2
_Keys = dict[str, bytes] | None  # by identity; None: there are none


@dataclass(eq=False)
class RelayDirectory:
    """`host` and `region` are the trainer's. Producers of its host read its file, so they have nothing to hand on."""

    channel: ServerChannel
    host: str
    region: str
    _warn: Throttle = field(default_factory=partial(Throttle, logger))
    _refresh_at: float = -math.inf
    _told: dict[bytes, dict[str, bytes]] = field(default_factory=dict)  # by peer: the keys that its relay lets in
    _hosts: list[Host] = field(default_factory=list)
    _addresses: dict[str, RelayAddress] = field(default_factory=dict)  # by host
    _sources: dict[str, list[str]] = field(default_factory=dict)  # by host

    def refresh(self, now: float, sessions: Mapping[bytes, ProducerSession]) -> None:
        """Looks, a few times a second, who relays, and has every relay know who is authorized now."""
        if now < self._refresh_at:
            return
        self._refresh_at = now + _EVERY_S
        keys = self.channel.authorized()
        self._told = {peer: told for peer, told in self._told.items() if peer in sessions}
        hosts: dict[str, Host] = {}
        self._addresses = {}
        for peer, session in sessions.items():
            if not session.host:
                continue
            if session.heartbeat.relay and session.host not in self._addresses:
                address = self._address(peer, session, keys)
                if address is not None:
                    self._addresses[session.host] = address
            known = hosts.get(session.host)
            region = known.region if known else session.region
            hosts[session.host] = Host(session.host, region, session.host in self._addresses)
        if self._hosts != list(hosts.values()):
            self._hosts = list(hosts.values())
            self._sources = sources(self._hosts, self.region)

    def with_relays(self, offer: PolicyOffer, session: ProducerSession) -> PolicyOffer:
        """The offer of the newest policy to this producer, with the relays that it is to ask first."""
        named = [self._addresses[name] for name in self._sources.get(session.host, ()) if name in self._addresses]
        return structs.replace(offer, relays=named) if named else offer

    def _address(self, peer: bytes, session: ProducerSession, keys: _Keys) -> RelayAddress | None:
        """Where a producer relays; None if nobody may be sent there."""
        relay = session.heartbeat.relay
        if session.host == self.host:
            return None
        if keys is None:
            return RelayAddress(relay) if is_loopback(relay) else None
        if self._told.get(peer) != keys:
            peers = RelayPeers([RelayPeer(name, key.decode()) for name, key in keys.items()])
            try:
                if not self.channel.send(peer, peers):
                    return None
            except CodecError as error:
                self._warn("peers", f"{session.name} cannot relay: {error}")
                return None
            self._told[peer] = keys
        own = keys.get(identity_of(session.name))
        return RelayAddress(relay, own.decode()) if own is not None else None
