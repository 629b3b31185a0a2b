"""`make bench-relays`: how long until every producer of three regions has a policy, by relays and by one copy each.

Guarantee: trainer, link, cache, relay and CURVE are those of the product; each producer is a process. 16 producers on 8 hosts run
in three regions, the trainer in the first. What it and a region far from it say to each other shares one link of 200 Mbit/s in
each direction, which takes 80 ms each way (`benchmarks.shaped_links`); inside a region nothing is shaped, and no relay is asked
across regions. Beside both, in the same run: one producer alone at the far end of such a link. A policy is new random bytes, and
counts when its sha256 was seen to match. Hosts that share this machine's loopback share its cores, too.
"""

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import relays_side, shaped_links
from benchmarks.acceptor import Acceptor
from benchmarks.relays_side import Arrival, Side
from benchmarks.shaped_links import LinkSpec
from benchmarks.terms import HEARTBEAT_INTERVAL_S, MAX_MESSAGE_BYTES
from protocol.security.keys import AUTHORIZED, TRAINER, generate, trainer_keys
from protocol.transport.zeromq_server import ZmqServer

HOSTS = {"a": 3, "b": 3, "c": 2}  # by region; the trainer is in the first
PER_HOST = 2
HOME = "a"
_PATIENCE_S = 300.0


class Case(NamedTuple):
    name: str
    hosts: dict[str, int]
    per_host: int
    relays: bool


class Line(NamedTuple):
    """What a link between two regions is."""

    bytes_per_s: float
    delay_s: float


CASES = (
    Case("one alone", {"b": 1}, 1, relays=False),
    Case("relays", HOSTS, PER_HOST, relays=True),
    Case("one copy each", HOSTS, PER_HOST, relays=False),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/relays.json"), help="JSON file to write")
    parser.add_argument("--megabytes", type=float, default=40.0, help="of a policy (default: %(default)s)")
    parser.add_argument("--mbit", type=float, default=200.0, help="of a link, per second (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=80.0, help="of a link, each way (default: %(default)s)")
    parser.add_argument("--versions", type=int, default=3, help="measured in each case, after one that is not (3)")
    arguments = parser.parse_args(argv)
    logging.getLogger("consumer").setLevel(logging.ERROR)  # that producers leave is what they are told to do
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    num_bytes, line = round(arguments.megabytes * 1e6), Line(arguments.mbit * 1e6 / 8, arguments.delay_ms / 1000)
    measured = {case.name: measure(case, line, num_bytes, arguments.versions) for case in CASES}
    report = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()},
        "bytes": num_bytes,
        "mbit": arguments.mbit,
        "delay_ms": arguments.delay_ms,
        "cases": measured,
    }
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print_table(measured, num_bytes)


def measure(case: Case, line: Line, num_bytes: int, versions: int) -> dict[str, Any]:
    with started(case, line) as fleet:
        rounds = [fleet.publish(num_bytes) for _ in range(versions + 1)][1:]
    return {
        "producers": sum(case.hosts.values()) * case.per_host,
        "all_s": [each["all_s"] for each in rounds],
        "copies": [{name: carried / num_bytes for name, carried in each["carried"].items()} for each in rounds],
        "downloads": rounds[-1]["downloads"],
        "left": rounds[-1]["left"],
    }


class Fleet:
    """`producers` are processes with the pipes to them, by name."""

    def __init__(self, acceptor: Acceptor, links: Connection, producers: dict[str, "Child"]) -> None:
        self._acceptor, self._links, self.producers = acceptor, links, producers
        self._version = 0

    def publish(self, num_bytes: int, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Until every producer has it. `meanwhile` is called when it is announced."""
        blob = secrets.token_bytes(num_bytes)
        digest = hashlib.sha256(blob).hexdigest()
        before = self.carried()
        self._version += 1
        began = time.monotonic()
        self._acceptor.publish(self._version, digest, blob)
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
        """By producer, without those that have ended."""
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
                elif arrival.version == version:
                    arrivals[waiting.pop(pipe)] = arrival
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
    ports = iter(_free_ports(2 + 2 * len(far) + len(hosts)))
    trainer = (next(ports), next(ports))
    ways = {HOME: trainer} | {region: (next(ports), next(ports)) for region in far}
    links = [
        LinkSpec(region, line.bytes_per_s, line.delay_s, dict(zip(ways[region], trainer, strict=True)))
        for region in far
    ]
    relay_ports = {host: next(ports) if case.relays else None for host in hosts}
    sides = [
        Side(f"{host}-{number}-aa", host, host[0], ways[host[0]], keys, relay_ports[host])
        for host in hosts
        for number in range(case.per_host)
    ]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in trainer]
    channel = ZmqServer(endpoints[0], endpoints[1], MAX_MESSAGE_BYTES, trainer_keys(keys))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.relays_side", "benchmarks.shaped_links"])
    acceptor = stack.enter_context(Acceptor(channel, scratch, region=HOME))
    proxy = _child(context, stack, shaped_links.run, links).pipe
    assert proxy.recv() == "ready"
    fleet = Fleet(acceptor, proxy, {side.name: _child(context, stack, relays_side.run, side) for side in sides})
    fleet.wait_for(0)
    time.sleep(3 * HEARTBEAT_INTERVAL_S)  # these say who relays
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


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _summed(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}


def print_table(measured: dict[str, dict[str, Any]], num_bytes: int) -> None:
    alone = statistics.median(measured[CASES[0].name]["all_s"])
    print(f"\n{num_bytes / 1e6:g} MB; median (lowest to highest) until the last producer has it\n")
    print("| | producers | seconds | times one alone | copies over each link |")
    print("|---|---:|---:|---:|---|")
    for name, case in measured.items():
        seconds = case["all_s"]
        middle = statistics.median(seconds)
        copies = ", ".join(
            f"{region} {statistics.median(each[region] for each in case['copies']):.1f}" for region in case["copies"][0]
        )
        print(
            f"| {name} | {case['producers']} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {middle / alone:.2f} "
            f"| {copies} |"
        )


if __name__ == "__main__":
    main()
