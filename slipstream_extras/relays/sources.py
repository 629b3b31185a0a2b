"""Sources of a policy beside the trainer's socket: its file, the cache of this host, relays of others.

Guarantee: every policy found has its sha256. Sources are tried in order and abandoned if they are slow. If none has the policy,
the caller gets the right to download it from the trainer for all producers of this host.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from producer.link.policy_source import Claim as Download
from producer.link.policy_source import Found, from_file
from producer.metrics import PolicyCounts
from protocol.channel.client import RelayConnection
from protocol.channel.keys import SecretKey
from protocol.config.operation import TransportSection, is_loopback
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.wire.adapter_blob import BlobError, verify
from protocol.wire.messages import PolicyInfo, PolicyOffer, RelayAddress, RelayPeers
from slipstream_extras.relays import relay_download
from slipstream_extras.relays.host_cache import Claim, HostCache, host_cache
from slipstream_extras.relays.relay import Relay, relay_place
from slipstream_extras.relays.relay_download import ASK_EVERY_S, Failure, Rates, RelayDownload

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02
_MOST_BARRED = 256  # relays that are remembered for what was wrong with their policies


@dataclass
class PolicySources:
    """Sources in order. `name` is this producer's, `secret` its key, None without keys. Without a cache, policies are not shared
    on this host; without a relay, not with other hosts. Methods block, and return early once `cancelled` is set."""

    name: str
    transport: TransportSection
    secret: SecretKey | None = None
    cache: HostCache = field(default_factory=partial(HostCache, None))
    relay: Relay | None = None
    counts: PolicyCounts = field(default_factory=PolicyCounts)
    _rates: Rates = field(default_factory=Rates)
    _shares: bool = True  # the last policy had room in the cache
    _barred: deque[RelayAddress] = field(default_factory=partial(deque, maxlen=_MOST_BARRED))

    @property
    def relay_endpoint(self) -> str:
        """Return the address at which this producer hands policies on; "" while it does not."""
        return self.relay.endpoint if self.relay and self._shares else ""

    @property
    def relayed_bytes(self) -> int:
        return self.relay.num_bytes if self.relay else 0

    def admit(self, peers: RelayPeers | None) -> None:
        """Admit the peers that the trainer names to the relay here; None admits no peer, while the trainer is away."""
        if self.relay is not None:
            self.relay.admit_only(peers.peers if peers else ())

    def keep(self, digest: str) -> None:
        self.cache.keep(digest)

    def find(self, policy: PolicyInfo, offer: PolicyOffer, cancelled: threading.Event) -> Found:
        """Return the policy from the trainer's file, this host's cache or a relay; else the right to download it."""
        if (blob := from_file(policy, offer, self.counts)) is not None:
            return Found(blob, self.unshared(policy))
        claim = self._claim(policy, cancelled)
        if isinstance(claim, bytes):
            return Found(claim, self.unshared(policy))
        try:
            into: memoryview | None = None
            for relay in offer.relays:
                if cancelled.is_set() or relay in self._barred or not self._may_ask(relay):
                    continue
                into = claim.room(policy.num_bytes) if into is None else into
                if self._of_relay(policy, relay, claim, into, cancelled):
                    claim.share()
                    claim.release()
                    return Found(into, claim)
        except BaseException:
            claim.release()
            raise
        return Found(None, claim)

    def take_from_trainer(self, policy: PolicyInfo, blob: memoryview, claim: Download, seconds: float) -> bool:
        """Verify the bytes that came from the trainer and share them by `claim`. Returns False if their sha256 is wrong."""
        try:
            verify(blob, policy.digest)
        except BlobError:
            return False
        self.counts.count_download("trainer")
        self._rates.note(len(blob), seconds)
        claim.share()
        return True

    def unshared(self, policy: PolicyInfo) -> Claim:
        return Claim(self.cache, policy.digest, None)

    def _claim(self, policy: PolicyInfo, cancelled: threading.Event) -> Claim | bytes:
        """Return the policy from the cache, after waiting for another process's download, or else the right to download it."""
        digest = policy.digest
        self._shares = self.cache.has(digest) or self.cache.has_room(policy.num_bytes)
        if not self._shares:
            return self.unshared(policy)
        seen, seen_at = None, time.monotonic()
        while not cancelled.is_set():
            if (blob := self._of_cache(policy)) is not None:
                return blob
            claim = self.cache.claim(digest)
            if claim is not None:
                if (blob := self._of_cache(policy)) is None:  # else it was stored between the two looks
                    return claim
                claim.release()
                return blob
            state = self.cache.progress(digest)
            if state is None:
                break
            if state != seen:
                seen, seen_at = state, time.monotonic()
            elif time.monotonic() - seen_at > relay_download.PATIENCE_S:
                logger.warning(
                    "policy v%d: another producer of this host downloads it and makes no progress; downloading it here too",
                    policy.version,
                )
                break
            cancelled.wait(_LOOK_EVERY_S)
        return self.unshared(policy)

    def _of_cache(self, policy: PolicyInfo) -> bytes | None:
        blob = self.cache.read(policy.digest, policy.num_bytes)
        if blob is None:
            return None
        try:
            verify(blob, policy.digest)
        except BlobError as error:
            logger.warning("policy v%d in the cache of this host is removed: %s", policy.version, error)
            self.cache.drop(policy.digest)
            return None
        self.counts.count_download("cache")
        return blob

    def _of_relay(
        self, policy: PolicyInfo, relay: RelayAddress, claim: Claim, into: memoryview, cancelled: threading.Event
    ) -> bool:
        """Download the policy from a relay into `into`. Returns False if that failed or was cancelled."""
        began = time.monotonic()
        limit = self.transport.max_message_bytes
        download = RelayDownload(policy, into, self.transport.blob_chunk_bytes, self._rates.bytes_per_s, began)
        keys = (self.secret, relay.key.encode()) if self.secret and relay.key else None
        try:
            connection = RelayConnection(self.name, relay.endpoint, limit, keys)
        except ConfigError as error:
            logger.warning("policy v%d: %s", policy.version, error)
            return False
        try:
            why = _run(download, connection, claim.note, cancelled)
            if download.is_complete:
                verify(into, policy.digest)
        except BlobError:
            why = "wrong"
        finally:
            connection.close()
        if why is None:
            if download.is_complete:
                self.counts.count_download("relay")
                self._rates.note(policy.num_bytes, time.monotonic() - began)
            return download.is_complete
        self.counts.count_left(why)
        if why == "wrong":
            self._barred.append(relay)
        logger.warning("policy v%d: giving up on the relay at %s: %s", policy.version, relay.endpoint, why)
        return False

    def _may_ask(self, relay: RelayAddress) -> bool:
        """Check that a relay has a key; without keys, that it is on this host."""
        return relay.key is not None if self.secret else is_loopback(relay.endpoint)


@contextmanager
def open_sources(config: RunConfig, name: str, secret: SecretKey | None) -> Iterator[PolicySources]:
    """Open the sources of the producer `name`, whose key is `secret`; None without keys. Raises as `relay_place`."""
    transport = config.transport
    with host_cache(config.control_endpoint) as cache:
        if transport.relay_port is None:
            yield PolicySources(name, transport, secret, cache)
            return
        place = partial(relay_place, transport, config.control_endpoint)
        relay = Relay(cache, place, transport.max_message_bytes, secret)
        relay.start()
        try:
            yield PolicySources(name, transport, secret, cache, relay)
        finally:
            relay.stop()


def _run(
    download: RelayDownload, connection: RelayConnection, note: Callable[[int], None], cancelled: threading.Event
) -> Failure | None:
    """Run the download until it is complete or cancelled, which return None, or fails; then return the reason."""
    while not download.is_complete and not cancelled.is_set():
        now = time.monotonic()
        if (why := download.failure(now)) is not None:
            return why
        for request in download.due_requests(now):
            connection.send(request)
        for message in connection.poll(ASK_EVERY_S):
            download.receive(message, time.monotonic())
        note(download.progress)
    return None
