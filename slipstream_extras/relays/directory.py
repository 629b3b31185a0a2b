"""The relays that the trainer names to producers: which to ask for a policy, and which connections to accept.

Guarantee: a relay is named with the key of the identity that its producer connected with, whatever it says of itself; without
keys only relays on loopback are named. A relay learns who is authorized before any producer is sent to it, and of every change
within a fraction of a second. The directory belongs to the intake's thread.

`sources` depends on its arguments alone. A relay asks only relays that stand before it in the order of arrival, so no circle
forms, and the trainer sends each region far from it one copy, or few. No host asks itself. The list is short, and a producer that
finds no policy there asks the trainer.

The first relay of a region is its head. Heads form a tree under the trainer, in which each has at most `FAN_OUT` children; the
relays of a region form one under their head, those of the trainer's region under the trainer. Hosts without a relay are dealt out
to the relays of their region.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec import structs

from consumer.link.sessions import ProducerSession
from protocol.channel.channel import ServerChannel
from protocol.channel.keys import identity_of
from protocol.config.operation import is_loopback
from protocol.runtime.logs import Throttle
from protocol.wire.codec import CodecError
from protocol.wire.messages import PolicyOffer, RelayAddress, RelayPeer, RelayPeers

logger = logging.getLogger(__name__)

FAN_OUT = 4
MOST_SOURCES = 3


class Host(NamedTuple):
    """A host of producers. Hosts are in the order in which they came."""

    name: str
    region: str
    relays: bool


def sources(hosts: Sequence[Host], home: str) -> dict[str, list[str]]:
    """Return for each host the names of those whose relays it asks, the best first. `home` is the trainer's region."""
    heads: list[str] = []
    regions: dict[str, list[Host]] = {}
    for host in hosts:
        regions.setdefault(host.region, []).append(host)
    found: dict[str, list[str]] = {}
    for region, members in regions.items():
        relays = [host.name for host in members if host.relays]
        if region != home and relays:
            heads.append(relays[0])
        for place, name in enumerate(relays):
            found[name] = _above(relays, place, FAN_OUT if region == home else 1)
        for place, name in enumerate(host.name for host in members if not host.relays):
            found[name] = _with_those_above(relays, place % len(relays), region == home) if relays else []
    for place, name in enumerate(heads):
        found[name] = _above(heads, place, FAN_OUT)
    return found


def _with_those_above(relays: list[str], place: int, is_home: bool) -> list[str]:
    return [relays[place], *_above(relays, place, FAN_OUT if is_home else 1)][:MOST_SOURCES]


def _above(order: list[str], place: int, num_roots: int) -> list[str]:
    """The parent; its first child, which takes its part when it dies; and who is above them."""
    above: list[int] = []
    at = place
    while at >= num_roots:
        parent = (at - num_roots) // FAN_OUT
        first_child = num_roots + parent * FAN_OUT
        above += [parent, *([first_child] if first_child < at and at == place else [])]
        at = parent
    return [order[at] for at in above[:MOST_SOURCES]]


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
        """Find the relays, a few times a second, and send each of them the keys that are authorized now."""
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

    def with_relays(
        self, offer: PolicyOffer, session: ProducerSession, now: float, sessions: Mapping[bytes, ProducerSession]
    ) -> PolicyOffer:
        """The offer of the newest policy, or of its anchor, to this producer, with the relays that it is to ask first."""
        if session.host and session.host not in self._sources:  # it has just joined, and asks at once
            self._refresh_at = -math.inf
            self.refresh(now, sessions)
        named = [self._addresses[name] for name in self._sources.get(session.host, ()) if name in self._addresses]
        return structs.replace(offer, relays=named) if named else offer

    def _address(self, peer: bytes, session: ProducerSession, keys: _Keys) -> RelayAddress | None:
        """Return the address of a producer's relay; None if no producer may use it."""
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
