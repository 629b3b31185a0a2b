"""The acceptor in a process of its own, so that it can be measured, killed and started again.

Guarantee: the process ends with its owner; `look` is answered from what the trainer's own metrics are made of.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from benchmarks.acceptor import MAX_STALENESS, Acceptor
from benchmarks.terms import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, MAX_MESSAGE_BYTES
from protocol.channel.keys import trainer_keys
from protocol.channel.server import ZmqServer


class Job(msgspec.Struct):
    folder: str
    endpoint: str
    blob_endpoint: str
    keys: str | None
    groups_per_step: int
    session: str
    core: int | None = None  # to stay on
    max_staleness: int = MAX_STALENESS
    heartbeat_s: tuple[float, float] = (HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S)


class State(msgspec.Struct):
    at: float  # of CLOCK_MONOTONIC
    joined: int  # producers
    num_bytes: int  # resident
    cpu_s: float
    groups: int  # in the journal
    refused: dict[str, int]  # connections, by reason
    counts: dict[str, int]  # of the rollout buffer
    threads: dict[str, float]  # seconds of CPU


class AcceptorProcess:
    """`log` is a file for what the process writes."""

    def __init__(self, job: Job, log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.acceptor_process", msgspec.json.encode(job).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )
        self.opened_at = self._read().at

    def look(self) -> State:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Ends it as a run ends."""
        self._process.communicate(timeout=60)
        if self._process.returncode:
            raise RuntimeError(f"the acceptor failed with exit code {self._process.returncode}")

    def _read(self) -> State:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the acceptor ended with exit code {self._process.wait()}")
        return msgspec.json.decode(line, type=State)


@contextmanager
def started(job: Job, log: Path) -> Iterator[AcceptorProcess]:
    process = AcceptorProcess(job, log)
    try:
        yield process
    finally:
        process.kill()


def _state(server: ZmqServer, acceptor: Acceptor) -> State:
    process = psutil.Process()
    with process.oneshot():
        used, resident = process.cpu_times(), process.memory_info().rss
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for thread in process.threads():  # libzmq's have names for the kernel alone
        names.setdefault(thread.id, Path(f"/proc/self/task/{thread.id}/comm").read_text().strip())
    return State(
        time.monotonic(), len(acceptor.intake.fleet.sessions), resident, used.user + used.system,
        acceptor.journal.last_seq, dict(server.refusals.counts), dict(acceptor.buffer.totals),
        {names[t.id]: t.user_time + t.system_time for t in process.threads()},
    )  # fmt: skip


def main(job: Job) -> None:
    logging.basicConfig(level=logging.ERROR)
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    keys = trainer_keys(Path(job.keys)) if job.keys else None
    server = ZmqServer(job.endpoint, job.blob_endpoint, MAX_MESSAGE_BYTES, keys)
    steps = (job.groups_per_step, job.max_staleness)
    with Acceptor(server, Path(job.folder), steps=steps, session=job.session, heartbeat_s=job.heartbeat_s) as acceptor:
        print(msgspec.json.encode(_state(server, acceptor)).decode(), flush=True)
        for _ in sys.stdin:
            print(msgspec.json.encode(_state(server, acceptor)).decode(), flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
