"""One process of the transport benchmark, on one core: `python -m benchmarks.transport_side` with a `Side` as JSON.

Guarantee: time and CPU (of all threads, libzmq's included) are those between the same two groups on both sides, after the
first `WARM_UP`; the result is one line of JSON. The protocol's receiver does with a group what the intake does between the
socket and the journal: it checks every buffer, makes the frame that the journal keeps, and acknowledges.
"""

import os
import pickle
import resource
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import zmq

from benchmarks.groups import SHAPE, GroupFactory
from benchmarks.terms import MAX_MESSAGE_BYTES
from protocol.channel.client import ZmqClient
from protocol.channel.keys import producer_keys, trainer_keys
from protocol.channel.server import ZmqServer
from protocol.wire.codec import encode
from protocol.wire.messages import Ack, Bye, Group, Nack, PolicyInfo

WARM_UP = 500  # groups
PRODUCER = "bench"
_WINDOW = 256  # groups on their way
_GIVE_UP_S = 120.0
_POLICY = PolicyInfo(0, "0" * 64, 1)


class Side(msgspec.Struct):
    wire: Literal["protocol", "pickle"]
    role: Literal["receiver", "sender"]
    endpoint: str
    blob_endpoint: str
    keys: str | None
    core: int
    groups: int


class Spent(msgspec.Struct):
    seconds: float
    cpu_s: float


class _Meter:
    """Counts groups and notes time and CPU at the first and the last one that are measured."""

    def __init__(self, groups: int) -> None:
        self.left = WARM_UP + groups
        self._groups = groups
        self._at: list[tuple[float, float]] = []

    def count(self) -> None:
        self.left -= 1
        if self.left in (self._groups, 0):
            used = resource.getrusage(resource.RUSAGE_SELF)
            self._at.append((time.perf_counter(), used.ru_utime + used.ru_stime))

    def spent(self) -> Spent:
        (since, cpu_before), (until, cpu_after) = self._at
        return Spent(until - since, cpu_after - cpu_before)


def _receive(side: Side, meter: _Meter) -> None:
    keys = trainer_keys(Path(side.keys)) if side.keys else None
    channel = ZmqServer(side.endpoint, side.blob_endpoint, MAX_MESSAGE_BYTES, keys)
    kept = [b""] * _WINDOW
    leaves = False
    while not leaves:
        for peer, message in channel.poll(_GIVE_UP_S):
            match message:
                case Group():
                    SHAPE.parse(message)
                    kept[meter.left % _WINDOW] = encode(message)
                    assert channel.send(peer, Ack(message.lease_id, "accepted", _POLICY))
                    meter.count()
                case Bye():
                    leaves = True
    channel.close()


def _send(side: Side, meter: _Meter) -> None:
    keys = producer_keys(Path(side.keys), PRODUCER) if side.keys else None
    channel = ZmqClient(PRODUCER, side.endpoint, side.blob_endpoint, MAX_MESSAGE_BYTES, keys)
    factory = GroupFactory(0)
    unsent, waiting = meter.left, 0
    while not channel.send(Nack("hello", "returned")):  # until the trainer's side is there
        time.sleep(0.01)
    while meter.left:
        while unsent and waiting < _WINDOW and channel.send(factory.group(f"0-{unsent}-0-1-bench", 0)):
            unsent -= 1
            waiting += 1
        for message in channel.poll(_GIVE_UP_S):
            assert isinstance(message, Ack), message
            waiting -= 1
            meter.count()
    channel.send(Bye("stopping"))
    channel.close()


def _receive_pickles(side: Side, meter: _Meter) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set_hwm(_WINDOW)
        socket.bind(side.endpoint)
        while meter.left:
            pickle.loads(socket.recv())  # noqa: S301 - what this is compared with
            meter.count()


def _send_pickles(side: Side, meter: _Meter) -> None:
    group = GroupFactory(0).group("0-0-0-1-bench", 0)
    arrays = {
        "lease_id": group.lease_id,
        "policy_version": group.policy_version,
        "prompt_ids": np.frombuffer(group.prompt_ids, "<i4"),
        "completion_lengths": np.frombuffer(group.completion_lengths, "<i4"),
        "completion_ids": np.frombuffer(group.completion_ids, "<i4"),
        "logprobs": np.frombuffer(group.logprobs, "<f4"),
        "rewards": np.frombuffer(group.rewards, "<f4"),
        "truncated": np.frombuffer(group.truncated, "u1"),
    }
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set_hwm(_WINDOW)
        socket.connect(side.endpoint)
        while meter.left:
            socket.send(pickle.dumps(arrays, protocol=5))
            meter.count()


_RUN = {
    ("protocol", "receiver"): _receive,
    ("protocol", "sender"): _send,
    ("pickle", "receiver"): _receive_pickles,
    ("pickle", "sender"): _send_pickles,
}

if __name__ == "__main__":
    chosen = msgspec.json.decode(sys.argv[1], type=Side)
    os.sched_setaffinity(0, {chosen.core})
    counted = _Meter(chosen.groups)
    _RUN[chosen.wire, chosen.role](chosen, counted)
    print(msgspec.json.encode(counted.spent()).decode())
