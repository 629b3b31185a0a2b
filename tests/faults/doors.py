"""A door in a process of its own, as tests see it, and a producer with a right to be there."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import zmq

from benchmarks.groups import ENGINE_FACTS
from protocol.channel.client import ZmqClient
from protocol.channel.keys import AUTHORIZED, ProducerKeys, generate, producer_keys
from protocol.wire.messages import Group, Lease
from tests.scripted import ScriptedProducer, made_up_group
from tests.unit.protocol.channel_harness import eventually, reserve_port

LIMIT = 2**20
REPOSITORY = Path(__file__).parents[2]


class Door:
    """See `tests.faults.door`.

    Args:
        sockets: a folder for ipc; None: tcp on loopback.
    """

    def __init__(self, stack: ExitStack, folder: Path, keys: Path | None, sockets: Path | None = None) -> None:
        self.keys = keys
        if sockets is None:
            self.ports = [reserve_port(stack) for _ in range(2)]
            self.endpoints = [f"tcp://127.0.0.1:{port}" for port in self.ports]
        else:
            self.endpoints = [f"ipc://{sockets}/control.ipc", f"ipc://{sockets}/blobs.ipc"]
        command = [sys.executable, "-m", "tests.faults.door", str(folder), *self.endpoints, str(LIMIT)]
        self.log = folder / "door.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(keys)] if keys else command,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        stack.enter_context(self.process)
        stack.callback(self.process.kill)
        assert self.process.stdout.readline() == "open\n", self.log.read_text()

    def look(self, command: str = "") -> Any:
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def refused(self, reason: str) -> int:
        return self.look()["refusals"][reason]

    def told_of(self, producer: str) -> int:
        """Return how often the log says that this producer joined or left."""
        return self.log.read_text().count(f"producer {producer} ")

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    def close(self) -> int:
        """Its exit code; not 0 if a thread had ended before."""
        self.process.stdin.close()
        return self.process.wait(60)

    def identity(self, name: str, *, authorized: bool = True) -> ProducerKeys:
        generate(self.keys, name)
        if authorized:
            shutil.copy(self.keys / f"{name}.public", self.keys / AUTHORIZED)
        return producer_keys(self.keys, name)

    def client(self, name: str, keys: ProducerKeys | None) -> ZmqClient:
        control, blobs = self.endpoints
        return ZmqClient(name, control, blobs, LIMIT, keys)

    def raw(self, stack: ExitStack, keys: ProducerKeys, port: int) -> "zmq.Socket[bytes]":
        """A peer that keeps none of our rules."""
        dealer = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
        dealer.linger = 0
        dealer.reconnect_ivl = -1
        show_keys(dealer, keys)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        return dealer


def show_keys(dealer: "zmq.Socket[bytes]", keys: ProducerKeys) -> None:
    dealer.curve_serverkey, dealer.curve_publickey = keys.trainer, keys.secret.public()
    dealer.curve_secretkey = keys.secret.reveal()


class Honest(ScriptedProducer):
    """A producer that works at an easy pace, and remembers its groups."""

    def __init__(self, channel: Any, name: str) -> None:
        self.groups: list[Group] = []
        self.rests = False
        super().__init__(channel, ENGINE_FACTS, name=name, answer=self._make)

    def _make(self, lease: Lease, version: int) -> Group:
        time.sleep(0.02)
        self.groups.append(made_up_group(lease, version))
        return self.groups[-1]

    def _answer_ready(self) -> None:
        if not self.rests:
            super()._answer_ready()

    def wait_for_acks(self, more: int = 3) -> None:
        wanted = len(self.acks) + more
        eventually(lambda: len(self.acks) >= wanted, "acknowledgements of honest work")
