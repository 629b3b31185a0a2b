"""Producers without an engine: `python -m benchmarks.load` with the name of a file that holds a `Load` as JSON.

Guarantee: each producer has the product's link, with a connection and a name of its own, and answers each lease once with a
scripted group; one thread serves all of a process, whose standard input ends it. At a given rate a producer sends at times drawn
beforehand (a Poisson process), whether or not earlier groups are acknowledged; at rate 0 it answers a lease as soon as it has it,
or makes as many groups at once as it has slots, each in between half and one and a half of `group_s`. Each latency is from the
moment at which a group is finished to that at which its acknowledgement is read.
"""

import functools
import heapq
import logging
import math
import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.groups import ENGINE_FACTS, MAX_MESSAGE_BYTES, GroupFactory
from producer.link.events import LeaseAbandoned, LinkEvent, PolicyArrived, RunBegan, SessionBegan
from producer.link.session import Link, Mailbox
from producer.metrics import Counters, Workload
from protocol.channel.channel import BadFrame
from protocol.channel.client import ZmqClient
from protocol.channel.keys import ProducerKeys, identity_of, producer_keys
from protocol.config.operation import TransportSection
from protocol.wire.messages import Ack, Hello, Lease, Message, TrainerMessage
from slipstream_extras.relays.sources import PolicySources

_STEP_EVERY_S = 0.2  # of a producer that nothing arrives for
_FLUSH_S, _LEAVE_S = 60.0, 0.5
_STDIN = -1


class Load(msgspec.Struct):
    """What the producers of one process do. They begin at the time, of CLOCK_MONOTONIC, that the first line of standard input
    says, and end with the input."""

    names: list[str]
    endpoint: str
    blob_endpoint: str
    keys: str | None  # folder with a key for each name
    rate: float  # groups per second of each producer; 0: as fast as leases allow
    capacity: int
    duration_s: float
    seed: int
    result: str  # file to write: .npy, float64 (groups, 2): when acknowledged, and how long after it was finished
    core: int | None = None  # to stay on
    slots: int = 0  # groups that are made at once; 0: each is there at once
    group_s: float = 0.0  # that one takes on average
    news: str | None = None  # file that is told of every lease, and of every group that is acknowledged


class _Watch:
    """The sockets of all producers, each with the number of its owner."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, int] = {}

    def add(self, descriptor: int, owner: int) -> None:
        self._owners[descriptor] = owner
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, owner: int) -> None:
        for descriptor in [descriptor for descriptor, other in self._owners.items() if other == owner]:
            self._epoll.unregister(descriptor)
            del self._owners[descriptor]

    def wait(self, timeout_s: float) -> set[int]:
        """The owners of what has something to read."""
        return {self._owners[descriptor] for descriptor, _ in self._epoll.poll(max(0.0, timeout_s))}


class _Channel(ZmqClient):
    """Never waits. `watch` has its sockets looked at, for producer `number`; `note` is told of acknowledgements."""

    def __init__(self, load: Load, number: int, watch: _Watch, note: Callable[[Ack], None]) -> None:
        self._number, self._sockets_of, self._note = number, watch, note
        name = load.names[number]
        keys = _keys(load.keys, identity_of(name)) if load.keys else None
        super().__init__(name, load.endpoint, load.blob_endpoint, MAX_MESSAGE_BYTES, keys)

    def _open(self, kind: int, options: dict[int, Any]) -> list[tuple["zmq.Socket[bytes]", str]]:
        opened = super()._open(kind, options)
        for socket, _ in opened:
            self._sockets_of.add(int(socket.get(zmq.FD)), self._number)
        return opened

    def _shut(self) -> None:
        self._sockets_of.remove(self._number)
        super()._shut()

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]:
        arrived = super().poll(0.0)
        for message in arrived:
            if isinstance(message, Ack):
                self._note(message)
        return arrived

    def send(self, message: Message) -> bool:
        return bool(self.sockets) and super().send(message)

    def wake(self) -> None:
        """The thread that would be woken is this one."""


@functools.cache
def _keys(folder: str, identity: str) -> ProducerKeys:
    return producer_keys(Path(folder), identity)


class _Producer:
    def __init__(self, load: Load, number: int, factory: GroupFactory, watch: _Watch) -> None:
        self._load, self._factory = load, factory
        self._chance = random.Random(load.seed + number)
        self._version = -1
        self._leases: list[tuple[float, str, int]] = []  # a heap: when each is due, with its policy floor
        self._free_at = [0.0] * load.slots  # a heap
        self._finished_at: dict[str, float] = {}
        self._due = self._ends_at = math.inf
        self._ended = False
        self.acks: list[tuple[float, float]] = []
        self._news = open(load.news, "a", buffering=1) if load.news else None  # noqa: SIM115
        self._mailbox = Mailbox(_Channel(load, number, watch, self._acknowledged))
        transport = TransportSection(endpoint=load.endpoint, keys=load.keys)
        hello = Hello(load.names[number], ENGINE_FACTS, load.capacity)
        self._link = Link(
            self._mailbox, hello, transport, PolicySources(load.names[number], transport), self._take, Counters(),
            lambda: Workload((), len(self._leases), 0, 0.0),
        )  # fmt: skip

    def step(self, now: float) -> float:
        """Does what is due; returns when to be called again."""
        while self._due_at() <= now:
            _, lease_id, floor = heapq.heappop(self._leases)
            if self._load.rate:
                self._due += self._chance.expovariate(self._load.rate)
            self._finished_at[lease_id] = now
            self._mailbox.put(self._factory.group(lease_id, max(self._version, floor)))
        self._ended = self._ended or self._link._step()
        return min(now + _STEP_EVERY_S, self._due_at())

    def begin(self, at: float) -> None:
        self._due = at + (self._chance.expovariate(self._load.rate) if self._load.rate else 0.0)
        self._ends_at = at + self._load.duration_s

    def finish(self) -> None:
        """No group is finished any more."""
        self._ends_at = -math.inf

    def leave(self) -> None:
        self._link.stop(0.0)
        self._ended = self._ended or self._link._step()

    @property
    def unacknowledged(self) -> int:
        return len(self._finished_at)

    def _due_at(self) -> float:
        """When the next group is finished, as far as leases say; infinite before the first and after the last one."""
        at = max(self._due, self._leases[0][0]) if self._leases else math.inf
        return at if at < self._ends_at else math.inf

    def _take(self, event: LinkEvent) -> None:
        match event:
            case Lease(lease_id):
                began = due = time.monotonic()
                if self._free_at:
                    began = max(began, self._free_at[0])
                    due = began + self._chance.uniform(0.5, 1.5) * self._load.group_s
                    heapq.heapreplace(self._free_at, due)
                heapq.heappush(self._leases, (due, lease_id, event.policy_floor))
                self._tell(lease_id, "leased", time.monotonic(), began, due)
            case LeaseAbandoned(abandoned):
                self._leases = sorted(lease for lease in self._leases if lease[1] != abandoned)
            case RunBegan(policy) | SessionBegan(policy):
                self._version = policy.version
            case PolicyArrived(downloaded):
                self._version = downloaded.policy.version

    def _acknowledged(self, ack: Ack) -> None:
        now = time.monotonic()
        finished_at = self._finished_at.pop(ack.lease_id, None)
        if finished_at is not None:
            self.acks.append((now, now - finished_at))
            self._tell(ack.lease_id, ack.outcome)

    def _tell(self, lease_id: str, what: str, *times: float) -> None:
        if self._news:
            self._news.write(msgspec.json.encode([lease_id, what, *times]).decode() + "\n")


def run(load: Load, begins_at: float = math.inf) -> None:
    """Until standard input ends, and then until everything is acknowledged. The process ends with it."""
    if load.core is not None:
        os.sched_setaffinity(0, {load.core})
    logging.basicConfig(level=logging.ERROR)
    watch, factory = _Watch(), GroupFactory(load.seed)
    watch.add(sys.stdin.fileno(), _STDIN)
    producers = [_Producer(load, number, factory, watch) for number in range(len(load.names))]
    for producer in producers:
        producer.begin(begins_at)
    next_at = [0.0] * len(producers)
    queue = [(0.0, number) for number in range(len(producers))]
    ends_at = math.inf
    while ends_at == math.inf or any(producer.unacknowledged for producer in producers):
        assert time.monotonic() < ends_at, "groups were not acknowledged"
        ready = watch.wait(queue[0][0] - time.monotonic())
        if _STDIN in ready:
            ready = set(range(len(producers)))
            if line := sys.stdin.readline():
                for producer in producers:
                    producer.begin(float(line))
            else:
                watch.remove(_STDIN)
                ends_at = time.monotonic() + _FLUSH_S
                for producer in producers:
                    producer.finish()
        while queue and queue[0][0] <= time.monotonic():
            at, number = heapq.heappop(queue)
            if at == next_at[number]:
                ready.add(number)
        for number in ready:
            next_at[number] = producers[number].step(time.monotonic())
            heapq.heappush(queue, (next_at[number], number))
    np.save(load.result, np.array([ack for producer in producers for ack in producer.acks], np.float64).reshape(-1, 2))
    for producer in producers:
        producer.leave()
    time.sleep(_LEAVE_S)
    os._exit(0)  # the contexts of so many producers take long to end


if __name__ == "__main__":
    run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Load))
