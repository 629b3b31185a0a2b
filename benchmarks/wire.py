"""Acknowledgements over the whole path: producers in their own processes, the acceptor in this one.

Guarantee: every group that a producer counts as acknowledged was in the journal by then; what is measured leaves out the
first second, and the journal is counted at the end.
"""

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

_START_S = 3.0  # for the processes to start and greet
_WARM_UP_S = 1.0
_LEASES = 256  # of all producers together


@dataclass(frozen=True)
class Acknowledgements:
    """One configuration."""

    producers: int
    offered_per_s: float  # by all producers together; 0: as fast as leases allow
    duration_s: float
    latency_s: NDArray[np.float64]

    @property
    def groups_per_s(self) -> float:
        return len(self.latency_s) / self.duration_s


def acknowledgements(folder: Path, producers: int, offered_per_s: float, duration_s: float) -> Acknowledgements:
    """Measures for `duration_s` with a new journal in `folder`, which is on the disk in question."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as short:
        endpoint = f"ipc://{short}/c"
        with Acceptor(endpoint, folder) as acceptor:
            starts_at = time.monotonic() + _START_S
            results = [Path(short) / f"{number}.npy" for number in range(producers)]
            processes = [
                _start(
                    Load(
                        name=f"load-{number}",
                        endpoint=endpoint,
                        rate=offered_per_s / producers,
                        capacity=_LEASES // producers,
                        starts_at=starts_at,
                        duration_s=_WARM_UP_S + duration_s,
                        seed=number,
                        result=str(result),
                    )
                )
                for number, result in enumerate(results)
            ]
            try:
                for process in processes:
                    if process.wait(_START_S + duration_s + 60) != 0:
                        raise RuntimeError(f"a producer failed with exit code {process.returncode}")
            finally:
                for process in processes:
                    process.kill()
            acks = np.concatenate([np.load(result) for result in results])
            journalled = acceptor.journal.last_seq
        if journalled != len(acks):
            raise RuntimeError(f"{len(acks)} groups were acknowledged and {journalled} are in the journal")
    since = starts_at + _WARM_UP_S
    measured = (acks[:, 0] >= since) & (acks[:, 0] < since + duration_s)
    return Acknowledgements(producers, offered_per_s, duration_s, acks[measured, 1])


def _start(load: Load) -> "subprocess.Popen[bytes]":
    job = Path(load.result).with_suffix(".json")
    job.write_bytes(msgspec.json.encode(load))
    return subprocess.Popen([sys.executable, "-m", "benchmarks.load", str(job)])
