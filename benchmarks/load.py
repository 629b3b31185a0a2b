"""Producers without an engine: `python -m benchmarks.load` with the name of a file that holds `Load`s as JSON.

Guarantee: each has a thread, a connection and a name of its own, speaks the protocol over the product's channel and answers
each lease once. At a given rate it sends at times drawn beforehand (a Poisson process), whether or not earlier groups are
acknowledged; at rate 0 it sends as soon as it has a lease. Each latency is from the call that sends a group to the moment at
which its acknowledgement is read.
"""

import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.groups import GroupFactory
from benchmarks.terms import ENGINE_FACTS, HEARTBEAT_INTERVAL_S, MAX_MESSAGE_BYTES
from protocol.transport.zeromq_client import ZmqClient
from protocol.wire.messages import Ack, Bye, Heartbeat, Hello, Lease, Policy, Welcome

_LONGEST_POLL_S = 0.05


class Load(msgspec.Struct):
    """What one producer does. `starts_at` and the times it reports are of CLOCK_MONOTONIC, which processes share."""

    name: str
    endpoint: str
    rate: float  # groups per second; 0: as fast as leases allow
    capacity: int
    starts_at: float
    duration_s: float
    seed: int
    result: str  # file to write: .npy, float64 (groups, 2): when acknowledged, and how long after it was sent
    core: int | None = None  # to stay on


class _Producer:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._channel = ZmqClient(load.name, load.endpoint, f"{load.endpoint}.blobs", MAX_MESSAGE_BYTES)
        self._factory = GroupFactory(load.seed)
        self._version = -1
        self._leases: deque[tuple[str, int]] = deque()  # with the policy floor of each
        self._sent_at: dict[str, float] = {}
        self._acks: list[tuple[float, float]] = []
        self._finished = False
        self._beat_at = 0.0

    def run(self) -> None:
        load, rng = self._load, random.Random(self._load.seed)
        self._greet()
        due = load.starts_at
        ends_at = load.starts_at + load.duration_s
        while (now := time.monotonic()) < ends_at:
            self._beat(now)
            if load.rate == 0:
                while self._leases:
                    self._send()
                due = now + _LONGEST_POLL_S
            else:
                while due <= now and self._leases:
                    self._send()
                    due += rng.expovariate(load.rate)
            waits_for_lease = due <= now
            self._hear(_LONGEST_POLL_S if waits_for_lease else min(due - now, _LONGEST_POLL_S))
        while self._sent_at and time.monotonic() < ends_at + 10:
            self._hear(_LONGEST_POLL_S)
        self._channel.send(Bye("stopping"))
        self._channel.close()
        np.save(load.result, np.array(self._acks, np.float64).reshape(-1, 2))
        assert not self._sent_at, f"{len(self._sent_at)} groups were never acknowledged"

    def _greet(self) -> None:
        while self._version < 0:
            self._channel.send(Hello(self._load.name, ENGINE_FACTS, self._load.capacity))
            deadline = time.monotonic() + 0.5
            while self._version < 0 and time.monotonic() < deadline:
                self._hear(_LONGEST_POLL_S)

    def _beat(self, now: float) -> None:
        if now - self._beat_at >= HEARTBEAT_INTERVAL_S:
            self._beat_at = now
            held = [*(lease_id for lease_id, _ in self._leases), *self._sent_at]
            self._channel.send(Heartbeat(self._version, self._load.capacity, held, 0, 0.0))

    def _send(self) -> None:
        lease_id, floor = self._leases.popleft()
        group = self._factory.group(lease_id, max(self._version, floor))
        self._sent_at[lease_id] = time.monotonic()
        assert self._channel.send(group), "the queue to the trainer is full"

    def _hear(self, timeout_s: float) -> None:
        for message in self._channel.poll(timeout_s):
            match message:
                case Ack(lease_id, outcome, policy):
                    assert outcome == "accepted", outcome
                    now = time.monotonic()
                    self._acks.append((now, now - self._sent_at.pop(lease_id)))
                    self._version = policy.version
                case Lease():
                    self._leases.append((message.lease_id, message.policy_floor))
                case Welcome() | Policy():
                    self._version = message.policy.version
                case _:
                    raise AssertionError(f"{self._load.name} got {message}")


def _run_all(loads: list[Load]) -> None:
    if loads[0].core is not None:
        os.sched_setaffinity(0, {loads[0].core})
    threads = [threading.Thread(target=_Producer(load).run, name=load.name) for load in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    threading.excepthook = lambda problem: (sys.__excepthook__(*problem[:3]), os._exit(1))
    _run_all(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Load]))
