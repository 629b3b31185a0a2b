"""Acknowledgements over the whole path: producers in processes of their own (up to 8, more of them share one), the acceptor
in another.

Guarantee: every group that a producer counts as acknowledged was in the journal by then; what is measured leaves out the
first second, and the journal is counted at the end.
"""

import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.acceptor import AcceptorProcess, Job, State, started
from benchmarks.load import Load
from protocol.channel.keys import AUTHORIZED, generate
from tests.unit.protocol.channel_harness import reserve_port

_PROCESSES = 8
_JOIN_S = 120.0  # for all producers
_START_S, _WARM_UP_S, _IDLE_S, _SETTLE_S = 0.1, 1.0, 3.0, 2.0
_DOWN_S = 8.0  # that a killed trainer stays away, longer than `heartbeat_timeout_s`
_LEASES, _LEAST_LEASES = 256, 2  # of all producers together, and of each
_GROUPS_PER_STEP, _GROUPS_PER_STEP_EACH = (
    64,
    32,
)  # so that a large fleet, which shares a core, fetches no policy meanwhile


@dataclass(frozen=True)
class Wire:
    """Where one trainer listens: `keys` is a folder with a key for each producer, None without."""

    endpoint: str
    blob_endpoint: str
    keys: str | None = None


@dataclass(frozen=True)
class Idle:
    """What connected producers that do nothing cost the trainer."""

    joined_s: float  # from the start of the first producer's process to the last one's welcome
    bytes_each: float
    trainer_cpu: float  # cores


@dataclass(frozen=True)
class Acknowledgements:
    """One configuration."""

    producers: int
    offered_per_s: float  # by all producers together; 0: as fast as leases allow
    duration_s: float
    latency_s: NDArray[np.float64]
    trainer_cpu: float  # cores that the trainer's process used
    idle: Idle
    back_s: float  # from the opening of a trainer's ports, after a kill, to the last producer's welcome; NaN: none was killed
    refused: int  # connections

    @property
    def groups_per_s(self) -> float:
        return len(self.latency_s) / self.duration_s


@contextmanager
def local_wire(producers: list[str], *, with_keys: bool) -> Iterator[Wire]:
    """ipc, or tcp over loopback with a key of its own for each producer."""
    with tempfile.TemporaryDirectory(prefix="rl-bench-", dir="/dev/shm") as short, ExitStack() as reserved:
        if not with_keys:
            yield Wire(f"ipc://{short}/c", f"ipc://{short}/c.blobs")
            return
        keys = Path(short) / "keys"
        for name in ("trainer", *producers):
            generate(keys, name)
        for name in producers:
            shutil.copy(keys / f"{name}.public", keys / AUTHORIZED)
        endpoint, blob_endpoint = (f"tcp://127.0.0.1:{reserve_port(reserved)}" for _ in range(2))
        yield Wire(endpoint, blob_endpoint, str(keys))


def acknowledgements(
    folder: Path,
    producers: int,
    offered_per_s: float,
    duration_s: float,
    cores: tuple[int | None, int | None] = (None, None),
    *,
    with_keys: bool = False,
    kills: bool = False,
) -> Acknowledgements:
    """Measures for `duration_s` with a new journal in `folder`, which is on the disk in question.

    Args:
        cores: that the trainer and all producers stay on.
        kills: whether the trainer is killed afterwards, and another started.
    """
    identities = [f"load{number}" for number in range(producers)]
    with ExitStack() as stack:
        wire = stack.enter_context(local_wire(identities, with_keys=with_keys))
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-bench-")))
        groups_per_step = max(_GROUPS_PER_STEP, _GROUPS_PER_STEP_EACH * producers)
        job = Job(str(folder), *_of(wire), groups_per_step, "bench", cores[0])
        trainer = stack.enter_context(started(job, short / "trainer.log"))
        alone = trainer.look()
        loads = [
            Load(
                [f"{name}-1-{number:04x}" for number, name in enumerate(identities)][process::_PROCESSES],
                *_of(wire), offered_per_s / producers, max(_LEAST_LEASES, _LEASES // producers),
                _WARM_UP_S + duration_s, process * 10_000, str(short / f"{process}.npy"), cores[1],
            )
            for process in range(min(producers, _PROCESSES))
        ]  # fmt: skip
        running = [stack.enter_context(producing(load, short / f"{index}")) for index, load in enumerate(loads)]
        joined = _all_joined(trainer, producers)
        since_idle = trainer.look()
        idle = _look_at(trainer, since_idle.at + _IDLE_S)
        since = begin(running) + _WARM_UP_S
        before, after = _look_at(trainer, since), _look_at(trainer, since + duration_s)
        back_s = math.nan
        if kills:
            time.sleep(_SETTLE_S)
            trainer.kill()
            time.sleep(_DOWN_S)
            job.session = "again"
            trainer = stack.enter_context(started(job, short / "trainer.log"))
            back_s = _all_joined(trainer, producers).at - trainer.opened_at
        for process in running:
            end(process)
        acks = np.concatenate([np.load(load.result) for load in loads])
        last = trainer.look()
        if last.groups != len(acks):
            raise RuntimeError(f"{len(acks)} groups were acknowledged and {last.groups} are in the journal")
        trainer.close()
    measured = (acks[:, 0] >= since) & (acks[:, 0] < since + duration_s)
    per_idle = Idle(joined.at - alone.at, (idle.num_bytes - alone.num_bytes) / producers, _cores(since_idle, idle))
    refused = sum(after.refused.values()) + (sum(last.refused.values()) if kills else 0)
    return Acknowledgements(
        producers, offered_per_s, duration_s, acks[measured, 1], _cores(before, after), per_idle, back_s, refused
    )


def _of(wire: Wire) -> tuple[str, str, str | None]:
    return wire.endpoint, wire.blob_endpoint, wire.keys


def _all_joined(trainer: AcceptorProcess, producers: int) -> State:
    deadline = time.monotonic() + _JOIN_S
    while (state := trainer.look()).joined < producers:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{state.joined} of {producers} producers joined in {_JOIN_S:.0f} s: {state.refused}")
        time.sleep(0.05)
    return state


def _look_at(trainer: AcceptorProcess, moment: float) -> State:
    time.sleep(max(0.0, moment - time.monotonic()))
    return trainer.look()


def _cores(before: State, after: State) -> float:
    return (after.cpu_s - before.cpu_s) / max(after.at - before.at, 1e-9)


@contextmanager
def producing(load: Load, job: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of producers, which greet, and wait for `begin`."""
    job.write_bytes(msgspec.json.encode(load))
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.load", str(job)], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(processes: "Iterable[subprocess.Popen[bytes]]") -> float:
    """Lets producers work; returns when they do."""
    at = time.monotonic() + _START_S
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{at}\n".encode())
        process.stdin.flush()
    return at


def end(process: "subprocess.Popen[bytes]") -> None:
    """Has producers deliver what they have, and leave."""
    process.communicate(timeout=120)
    if process.returncode != 0:
        raise RuntimeError(f"a producer failed with exit code {process.returncode}")
