"""Trainer, producers on several hosts, relays, keys, and slow links between regions, as processes.

Guarantee: trainer, link, cache, relay and CURVE are those of the product; each producer is a process. What the trainer and a
region far from it send each other shares one link in each direction (`shaped_links`). Nothing is shaped inside a region, and no
relay is asked across regions. A policy is new random bytes, and counts when its sha256 was seen to match.
"""

import hashlib
import multiprocessing
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.acceptor import Acceptor
from benchmarks.groups import MAX_MESSAGE_BYTES
from protocol.channel.keys import AUTHORIZED, TRAINER, generate, trainer_keys
from protocol.channel.server import ZmqServer
from protocol.wire.adapter_blob import Anchor
from tests.unit.protocol.channel_harness import reserve_port

from . import relay_side, shaped_links
from .relay_side import Arrival, Side
from .runs import eventually
from .shaped_links import LinkSpec

HOME = "a"  # the trainer's region
_PATIENCE_S = 200.0


class Case(NamedTuple):
    hosts: dict[str, int]  # by region
    per_host: int
    num_late: int = 0  # producers, the last ones, that `Fleet.join` starts


class Line(NamedTuple):
    """Rate and delay of the link between two regions."""

    bytes_per_s: float
    delay_s: float


class Fleet:
    """`producers` are processes with the pipes to them, by name."""

    def __init__(
        self,
        acceptor: Acceptor,
        links: Connection,
        start: Callable[[Side], "Child"],
        early: list[Side],
        late: list[Side],
    ) -> None:
        self._acceptor, self._links, self._start = acceptor, links, start
        self.producers: dict[str, Child] = {}
        self._late = late
        self._version = 0
        self._counted: dict[str, dict[str, int]] = {}  # downloads up to the last arrival, by producer
        self._add(early)

    def join(self) -> None:
        """Start those that are late."""
        self._add(self._late)

    def _add(self, sides: list[Side]) -> None:
        self.producers |= {side.name: self._start(side) for side in sides}

    def publish(
        self, num_bytes: int, meanwhile: Callable[[], None] = lambda: None, anchor: Anchor | None = None
    ) -> dict[str, Any]:
        """Until every producer has it. `meanwhile` is called when it is announced."""
        blob = secrets.token_bytes(num_bytes)
        digest = hashlib.sha256(blob).hexdigest()
        before = self.carried()
        self._version += 1
        began = time.monotonic()
        self._acceptor.publish(self._version, digest, blob, anchor)
        meanwhile()
        arrivals = self.wait_for(self._version)
        after = self.carried()
        return {
            "all_s": max(each.at for each in arrivals.values()) - began,
            "carried": {name: after[name] - before[name] for name in after},
            "arrivals": arrivals,
            "downloads": _summed([each.downloads for each in arrivals.values()]),
            "left": _summed([each.left for each in arrivals.values()]),
        }

    def wait_for(self, version: int) -> dict[str, Arrival]:
        """By producer, without those that have ended. Each has the downloads since the arrival before."""
        deadline = time.monotonic() + _PATIENCE_S
        waiting = {child.pipe: name for name, child in self.producers.items()}
        arrivals: dict[str, Arrival] = {}
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            assert ready, f"{', '.join(waiting.values())} did not get v{version}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    arrival: Arrival | None = pipe.recv()
                except EOFError:
                    arrival = None
                if arrival is None:
                    del self.producers[waiting.pop(pipe)]
                    continue
                before = self._counted.get(name := waiting[pipe], {})
                self._counted[name] = arrival.downloads
                if arrival.version == version:
                    since = {source: count - before.get(source, 0) for source, count in arrival.downloads.items()}
                    arrivals[waiting.pop(pipe)] = arrival._replace(downloads=since)
        return arrivals

    def carried(self) -> dict[str, int]:
        """Bytes from the trainer over each link."""
        self._links.send("carried")
        carried: dict[str, list[int]] = self._links.recv()
        return {name: back for name, (_, back) in carried.items()}


class Child(NamedTuple):
    process: BaseProcess
    pipe: Connection


@contextmanager
def started(case: Case, line: Line) -> Iterator[Fleet]:
    """Every producer has the first version, and the trainer knows who relays."""
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as folder, ExitStack() as stack:
        yield _start(case, line, Path(folder), stack)


def _start(case: Case, line: Line, scratch: Path, stack: ExitStack) -> Fleet:
    hosts = [f"{region}{number}" for region, count in case.hosts.items() for number in range(count)]
    keys = scratch / f"k{secrets.token_hex(4)}"
    generate(keys, TRAINER)
    for host in hosts:
        generate(keys, host)
        shutil.copy(keys / f"{host}.public", keys / AUTHORIZED)
    far = [region for region in case.hosts if region != HOME]
    ports = iter([reserve_port(stack) for _ in range(2 + 2 * len(far) + len(hosts))])
    trainer = (next(ports), next(ports))
    ways = {HOME: trainer} | {region: (next(ports), next(ports)) for region in far}
    links = [
        LinkSpec(region, line.bytes_per_s, line.delay_s, dict(zip(ways[region], trainer, strict=True)))
        for region in far
    ]
    relay_ports = {host: next(ports) for host in hosts}
    sides = [
        Side(f"{host}-{number}-aa", host, host[0], ways[host[0]], keys, relay_ports[host])
        for host in hosts
        for number in range(case.per_host)
    ]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in trainer]
    channel = ZmqServer(endpoints[0], endpoints[1], MAX_MESSAGE_BYTES, trainer_keys(keys))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([relay_side.__name__, shaped_links.__name__])
    acceptor = stack.enter_context(Acceptor(channel, scratch, region=HOME))
    proxy = _child(context, stack, shaped_links.run, links).pipe
    assert proxy.recv() == "ready"
    num_early = len(sides) - case.num_late
    start = lambda side: _child(context, stack, relay_side.run, side)  # noqa: E731
    fleet = Fleet(acceptor, proxy, start, sides[:num_early], sides[num_early:])
    fleet.wait_for(0)
    early = {side.host for side in sides[:num_early]}
    eventually(lambda: {each.name for each in acceptor.intake._relays._hosts if each.relays} == early)
    return fleet


def _child(context: Any, stack: ExitStack, target: Any, argument: Any) -> Child:
    """A process that ends when the pipe to it is closed."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, argument), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.join, 30)
    stack.callback(ours.close)
    return Child(process, ours)


def _summed(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}
