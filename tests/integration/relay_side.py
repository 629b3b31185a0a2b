"""A producer without an engine: the product's link, cache of a host and relay, and what arrived when.

Guarantee: a policy counts when its sha256 was seen to match. Times are of CLOCK_MONOTONIC, which processes share.
"""

import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from benchmarks.groups import ENGINE_FACTS, MAX_MESSAGE_BYTES
from producer.link.events import LinkEvent, PolicyArrived
from producer.link.session import Link, Mailbox
from producer.metrics import Counters, Workload
from protocol.channel.client import ZmqClient
from protocol.channel.keys import producer_keys
from protocol.config.operation import TransportSection
from protocol.runtime.scratch import ROOT, common_folder
from protocol.wire.messages import Hello
from slipstream_extras.relays.host_cache import HostCache
from slipstream_extras.relays.relay import Relay, RelayPlace
from slipstream_extras.relays.sources import PolicySources


class Side(NamedTuple):
    name: str  # IDENTITY-NUMBER-HEX
    host: str
    region: str
    ports: tuple[int, int]  # that lead to the trainer
    keys: Path
    relay_port: int


class Arrival(NamedTuple):
    version: int
    at: float
    downloads: dict[str, int]
    left: dict[str, int]


def run(pipe: Connection, side: Side) -> None:
    """Says what arrived, until the pipe closes."""
    identity = side.name.split("-")[0]
    keys = producer_keys(side.keys, identity)
    transport = TransportSection(keys=str(side.keys))
    with ExitStack() as stack:
        cache = HostCache(stack.enter_context(common_folder(f"relays-{side.keys.name}-{side.host}", ROOT)))
        endpoint = f"tcp://127.0.0.1:{side.relay_port}"
        relay = Relay(cache, lambda: RelayPlace(endpoint, endpoint), MAX_MESSAGE_BYTES, keys.secret)
        stack.callback(relay.stop)
        relay.start()
        neighbours = PolicySources(side.name, transport, keys.secret, cache, relay)

        def arrived(event: LinkEvent) -> None:
            if not isinstance(event, PolicyArrived):
                return
            downloaded = event.downloaded
            assert downloaded.is_verified
            now, counts = time.monotonic(), neighbours.counts
            pipe.send(Arrival(downloaded.policy.version, now, dict(counts.downloads), dict(counts.left)))

        endpoints = [f"tcp://127.0.0.1:{port}" for port in side.ports]
        link = Link(
            Mailbox(ZmqClient(side.name, endpoints[0], endpoints[1], MAX_MESSAGE_BYTES, keys)),
            Hello(side.name, ENGINE_FACTS, 0, host=side.host, region=side.region),
            transport,
            neighbours,
            arrived,
            Counters(),
            lambda: Workload((), 0, 0, 0.0),
        )
        link.start()
        stack.callback(link.join)
        stack.callback(link.stop, 0.0)
        with suppress(EOFError):
            pipe.recv()
