"""Acknowledgements over the whole path: producers in processes of their own (up to 8, more of them share one), the acceptor
in this one.

Guarantee: every group that a producer counts as acknowledged was in the journal by then; what is measured leaves out the
first second, and the journal is counted at the end.
"""

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.acceptor import Acceptor
from benchmarks.load import Load
from benchmarks.terms import MAX_MESSAGE_BYTES
from protocol.transport.zeromq_server import ZmqServer

_START_S, _START_S_EACH = 3.0, 0.1  # for the processes to start and their producers to greet
_PROCESSES = 8
_WARM_UP_S = 1.0
_LEASES = 256  # of all producers together


@dataclass(frozen=True)
class Acknowledgements:
    """One configuration."""

    producers: int
    offered_per_s: float  # by all producers together; 0: as fast as leases allow
    duration_s: float
    latency_s: NDArray[np.float64]
    trainer_cpu: float  # cores that the trainer's process used

    @property
    def groups_per_s(self) -> float:
        return len(self.latency_s) / self.duration_s


def acknowledgements(
    folder: Path, producers: int, offered_per_s: float, duration_s: float, core: int | None = None
) -> Acknowledgements:
    """Measures for `duration_s` with a new journal in `folder`, which is on the disk in question.

    Args:
        core: that all producers stay on.
    """
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as short:
        endpoint = f"ipc://{short}/c"
        channel = ZmqServer(endpoint, f"{endpoint}.blobs", MAX_MESSAGE_BYTES)
        with Acceptor(channel, folder) as acceptor:
            starts_at = time.monotonic() + _START_S + producers * _START_S_EACH
            since = starts_at + _WARM_UP_S
            loads = [
                Load(
                    name=f"load-{number}",
                    endpoint=endpoint,
                    rate=offered_per_s / producers,
                    capacity=_LEASES // producers,
                    starts_at=starts_at,
                    duration_s=_WARM_UP_S + duration_s,
                    seed=number,
                    result=str(Path(short) / f"{number}.npy"),
                    core=core,
                )
                for number in range(producers)
            ]
            processes = [
                _start(Path(short) / f"{number}.json", loads[number::_PROCESSES])
                for number in range(min(producers, _PROCESSES))
            ]
            try:
                trainer_cpu = _cores_used(since, duration_s)
                for process in processes:
                    if process.wait(60) != 0:
                        raise RuntimeError(f"a producer failed with exit code {process.returncode}")
            finally:
                for process in processes:
                    process.kill()
            acks = np.concatenate([np.load(load.result) for load in loads])
            journalled = acceptor.journal.last_seq
        if journalled != len(acks):
            raise RuntimeError(f"{len(acks)} groups were acknowledged and {journalled} are in the journal")
    measured = (acks[:, 0] >= since) & (acks[:, 0] < since + duration_s)
    return Acknowledgements(producers, offered_per_s, duration_s, acks[measured, 1], trainer_cpu)


def _cores_used(since: float, duration_s: float) -> float:
    """CPU of this process over that time."""
    readings = []
    for moment in (since, since + duration_s):
        time.sleep(max(0.0, moment - time.monotonic()))
        used = resource.getrusage(resource.RUSAGE_SELF)
        readings.append((time.monotonic(), used.ru_utime + used.ru_stime))
    (began, cpu_before), (ended, cpu_after) = readings
    return (cpu_after - cpu_before) / (ended - began)


def _start(job: Path, loads: list[Load]) -> "subprocess.Popen[bytes]":
    job.write_bytes(msgspec.json.encode(loads))
    return subprocess.Popen([sys.executable, "-m", "benchmarks.load", str(job)])
