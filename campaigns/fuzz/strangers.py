"""A campaign of strangers against a trainer's door: `python -m campaigns.fuzz.strangers --minutes 10 --seed 1`.

Guarantee: a campaign that ends without a `Defect` has shown, over ipc and tcp, with and without keys, while raw connections said
what `campaigns.fuzz.zmtp` makes up and peers of ZeroMQ sent spoiled frames under any name,
- that no thread of the door ended, and that it has the threads and descriptors of before when they are gone;
- that its memory never grew by more than `MEMORY_MB`, beside what libzmq keeps of connections under a name that is in use;
- that an honest producer's groups were each acknowledged once, and are in the journal.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import apsw
import psutil
import zmq

from campaigns.fuzz.mutations import Mutator
from campaigns.fuzz.zmtp import AWAIT_READY, Script, Scripts
from protocol.channel.keys import ProducerKeys, generate
from tests.faults.doors import Door, Honest, show_keys

COMBINATIONS = tuple((transport, with_keys) for transport in ("tcp", "ipc") for with_keys in (False, True))
MEMORY_MB = 300  # the frames that wait to be read, of some dozen connections
NAMESAKE_BYTES = 32_768
_AT_ONCE = 48  # connections
_READY_S = 1.0
_RESET = struct.pack("=ii", 1, 0)
_SETTLE_S = 60.0


class Defect(AssertionError):
    """The door broke a promise."""


@dataclass
class Report:
    """Of one combination."""

    combination: str
    seconds: float = 0.0
    connections: Counter[str] = field(default_factory=Counter)  # by script
    sent_bytes: int = 0
    frames: int = 0  # of peers that speak ZeroMQ
    refused: dict[str, int] = field(default_factory=dict)  # by reason, at the door
    bad_frames: int = 0  # refused by the intake
    groups: int = 0  # acknowledged, of the honest producer
    outcomes: Counter[str] = field(default_factory=Counter)
    memory_mb: float = 0.0  # by which it grew at most
    namesakes: int = 0  # connections under a name that was in use, or may have been
    namesake_bytes: int = 0  # that they sent

    @property
    def bound_mb(self) -> float:
        """Of its memory: libzmq ignores a namesake and forgets neither it nor its bytes before the socket is closed."""
        return MEMORY_MB + (self.namesakes * NAMESAKE_BYTES + self.namesake_bytes) / 2**20

    @property
    def summary(self) -> str:
        refused = ", ".join(f"{name} {count}" for name, count in sorted(self.refused.items()) if count) or "none"
        return (
            f"{self.combination}: {self.connections.total()} connections ({self.namesakes} namesakes) with "
            f"{self.sent_bytes / 1e6:.0f} MB and {self.frames} frames of ZeroMQ peers in {self.seconds:.0f} s; "
            f"refused {refused}; {self.bad_frames} bad frames; memory +{self.memory_mb:.0f} MB of {self.bound_mb:.0f}; "
            f"{self.groups} honest groups acknowledged once; no defect"
        )


class RawStrangers(threading.Thread):
    """Plays scripts, many at once, until `over`."""

    def __init__(self, endpoints: list[str], scripts: Scripts, report: Report, over: threading.Event) -> None:
        super().__init__(name="raw-strangers")
        self._addresses = [_address(endpoint) for endpoint in endpoints]
        self._scripts = scripts
        self._report = report
        self._over = over
        self._number = 0

    def run(self) -> None:
        asyncio.run(self._play_all())

    async def _play_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._play_some())

    async def _play_some(self) -> None:
        while not self._over.is_set():
            self._number += 1
            script = self._scripts.script(self._number)
            at_once = (
                play(script, self._addresses[script.endpoint_index], self._over) for _ in range(script.num_connections)
            )
            for outcome in await asyncio.gather(*at_once, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, OSError):  # which is that it hung up
                    raise outcome
            self._report.connections[script.name] += script.num_connections
            self._report.sent_bytes += script.num_bytes
            if script.takes_name:
                self._report.namesakes += script.num_connections
                self._report.namesake_bytes += script.num_bytes


async def play(script: Script, address: str | tuple[str, int], over: threading.Event) -> None:
    """Raises `OSError` where the door has hung up, as it may."""
    loop = asyncio.get_running_loop()
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as stranger:
        stranger.setblocking(False)
        await asyncio.wait_for(loop.sock_connect(stranger, address), _READY_S)
        for piece in script.pieces:
            if piece == AWAIT_READY:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_await_ready(stranger), _READY_S)
            else:
                await asyncio.wait_for(loop.sock_sendall(stranger, piece), _READY_S)
            if script.pause_s and not over.is_set():
                await asyncio.sleep(script.pause_s)
        if script.end == "half_close":
            stranger.shutdown(socket.SHUT_WR)
        if script.end in ("half_close", "stay"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_listen(stranger, over), script.stay_s)
        elif script.end == "reset":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


async def _listen(stranger: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            if not await asyncio.wait_for(asyncio.get_running_loop().sock_recv(stranger, 65_536), 0.25):
                return


async def _await_ready(stranger: socket.socket) -> None:
    loop, heard = asyncio.get_running_loop(), b""
    while b"READY" not in heard and (more := await loop.sock_recv(stranger, 4096)):
        heard += more


def _address(endpoint: str) -> str | tuple[str, int]:
    path = endpoint.partition("://")[2]
    if endpoint.startswith("ipc"):
        return path
    host, _, port = path.rpartition(":")
    return host, int(port)


class ZmqStrangers(threading.Thread):
    """Peers of ZeroMQ that get in, with keys of an identity that is authorized where there are keys, and send what they should
    not, one after the other, until `over`."""

    def __init__(
        self, endpoints: list[str], keys: ProducerKeys | None, seed: int, report: Report, over: threading.Event
    ) -> None:
        super().__init__(name="zmq-strangers")
        self._endpoints = endpoints
        self._keys = keys
        self._rng = random.Random(seed)
        self._mutator = Mutator(seed)
        self._number = 0
        self._report = report
        self._over = over

    def run(self) -> None:
        with zmq.Context() as context:
            while not self._over.is_set():
                with context.socket(zmq.DEALER) as dealer:
                    self._send_some(dealer)

    def _send_some(self, dealer: "zmq.Socket[bytes]") -> None:
        rng, keys = self._rng, self._keys
        dealer.linger = 50
        dealer.immediate = 1
        dealer.reconnect_ivl = -1
        self._number += 1
        own = f"-{self._number}".encode()
        dealer.routing_id = rng.choice(
            (b"mallory-1-aa/1/" + own, b"p" + own, b"honest-1-aaaa/1/" + own, own.rjust(255))
        )
        if keys is not None:
            show_keys(dealer, keys)
        dealer.connect(rng.choice(self._endpoints))
        for _ in range(rng.choice((1, 20, 200))):
            if not dealer.poll(500, zmq.POLLOUT):
                return
            frames = [self._mutator.mutant(rng.randrange(2**32)).frame for _ in range(rng.choice((1, 1, 1, 2, 30)))]
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(frames, zmq.NOBLOCK)
                self._report.frames += len(frames)


class Before:
    """What the door had before anybody strange came, and has again when they are gone."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._process = psutil.Process(door.process.pid)
        self._threads = door.look()["threads"]
        self._num_descriptors = self._process.num_fds()
        self.memory_mb = door.memory_mb()

    def wait_until_again(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while problem := self._problem():
            if time.monotonic() > deadline:
                raise Defect(problem)
            time.sleep(0.1)

    def _problem(self) -> str | None:
        threads, num_descriptors = self._door.look()["threads"], self._process.num_fds()
        if threads != self._threads:
            return f"threads {threads} instead of {self._threads}"
        if num_descriptors > self._num_descriptors:
            return f"{num_descriptors} descriptors instead of {self._num_descriptors}"
        return None


def campaign(transport: str, with_keys: bool, seconds: float, seed: int, folder: Path) -> Report:
    """One combination. Raises `Defect` if the door broke a promise."""
    report = Report(f"{transport}, {'with' if with_keys else 'without'} keys")
    with ExitStack() as stack:
        if keys := folder / "keys" if with_keys else None:
            generate(keys, "trainer")
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory())) if transport == "ipc" else None
        door = Door(stack, folder, keys, sockets)
        channel = door.client("honest-1-aaaa", door.identity("honest") if keys else None)
        live = (bytes(channel.sockets[0].getsockopt(zmq.ROUTING_ID)),)
        honest = Honest(channel, "honest-1-aaaa")
        stack.callback(honest.stop)
        honest.start().wait_for_acks()
        before = Before(door)
        try:
            _attack(door, seed, live, report, seconds, before.memory_mb)
            _check_work(door, honest, report)
            before.wait_until_again()
            _look_into(door, report)
            if (code := door.close()) != 0:
                raise Defect(f"the door ended with exit code {code}")
            honest.join(10.0)
            _check_journal(folder, honest)
        except (AssertionError, OSError, ValueError, psutil.Error) as problem:  # it may be gone
            log = door.log.read_text(errors="replace")[-3000:]
            raise Defect(f"{report.combination}, seed {seed}: {problem!r}\n{log}") from problem
    return report


@contextlib.contextmanager
def strangers_at(
    endpoints: list[str], keys: ProducerKeys | None, seed: int, live: tuple[bytes, ...], report: Report
) -> Iterator[None]:
    """Strangers of both kinds, while the context lasts. `live` are routing ids of producers that are connected."""
    over, started = threading.Event(), time.monotonic()
    strangers = [
        RawStrangers(endpoints, Scripts(seed, live), report, over),
        ZmqStrangers(endpoints, keys, seed, report, over),
    ]
    for stranger in strangers:
        stranger.start()
    try:
        yield
        assert all(stranger.is_alive() for stranger in strangers), "a defect of this campaign, and not of the door"
    finally:
        report.seconds = time.monotonic() - started
        over.set()
        for stranger in strangers:
            stranger.join()


def _attack(door: Door, seed: int, live: tuple[bytes, ...], report: Report, seconds: float, memory_mb: float) -> None:
    keys = door.identity("mallory") if door.keys else None
    with strangers_at(door.endpoints, keys, seed, live, report):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            report.memory_mb = max(report.memory_mb, door.memory_mb() - memory_mb)
    if report.memory_mb > report.bound_mb:
        raise Defect(f"its memory grew by {report.memory_mb:.0f} MB, of {report.bound_mb:.0f}")


def _check_work(door: Door, honest: Honest, report: Report) -> None:
    honest.wait_for_acks()
    honest.rests = True
    deadline = time.monotonic() + _SETTLE_S
    while len(honest.acks) < len(honest.groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    times = Counter(ack.lease_id for ack in honest.acks)
    if times != Counter(group.lease_id for group in honest.groups):
        raise Defect(f"{len(honest.groups)} honest groups, acknowledged: {times.total()}, different: {len(times)}")
    report.groups = len(times)
    report.outcomes = Counter(ack.outcome for ack in honest.acks)
    if not report.outcomes.keys() <= {"accepted", "stale"}:
        raise Defect(f"honest groups were {dict(report.outcomes)}")
    if (joined := door.log.read_text(errors="replace").count("producer honest-1-aaaa ")) != 1:
        raise Defect(f"the honest producer joined or left {joined} times")


def _look_into(door: Door, report: Report) -> None:
    seen = door.look()
    report.refused = seen["refusals"]
    report.bad_frames = seen["counts"].get("bad_frames", 0)
    if report.refused["authenticator_dead"]:
        raise Defect("the authenticator died")


def _check_journal(folder: Path, honest: Honest) -> None:
    with closing(apsw.Connection(str(folder / "journal.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)) as journal:
        kept = Counter(lease_id for (lease_id,) in journal.execute("SELECT lease_id FROM groups"))
    lost = {ack.lease_id for ack in honest.acks} - kept.keys()  # it may have made groups while the door closed
    if lost or kept.total() != len(kept):
        raise Defect(f"the journal misses {len(lost)} honest groups and has {kept.total() - len(kept)} twice")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all combinations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("tcp", "ipc"), help="this one alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the reports as JSON")
    arguments = parser.parse_args(argv)
    chosen = [one for one in COMBINATIONS if arguments.transport in (None, one[0])]
    reports = []
    for transport, with_keys in chosen:
        folder = Path(tempfile.mkdtemp(prefix="slipstream-strangers-"))
        try:
            seconds = arguments.minutes * 60 / len(chosen)
            reports.append(campaign(transport, with_keys, seconds, arguments.seed, folder))
        except Defect as defect:
            print(f"DEFECT: {defect}", file=sys.stderr)
            return 1
        finally:
            shutil.rmtree(folder)
        print(reports[-1].summary, flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([vars(report) for report in reports], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
