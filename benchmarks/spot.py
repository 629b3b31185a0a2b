"""`python -m benchmarks.spot`: producers on spot machines, most of which are taken away once a minute.

Guarantee: the trainer is the product's but for the model, in a process of its own; producers are processes with the product's
link over tcp and CURVE and an engine that only waits, and a kill is SIGKILL. One in `_SILENT` of those that go is stopped
instead, so that nothing but silence tells of its end. Another takes its place at once. Time is compressed: a simulated minute
takes `60 / factor` seconds, and so do groups and heartbeats. What the product does not measure in heartbeats (the least time for
connecting again, retries, the disk) is not, so it weighs more here.

What counts: throughput, as a share of what the slots of living producers could have made, groups that were cut included; tokens
that were thrown away, as a share of those in flight at the kills; and that every prompt which a killed producer had was answered
by another, and none twice.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from benchmarks import load
from benchmarks.acceptor import Job, started
from benchmarks.groups import SHAPE
from benchmarks.made_on import made_on
from benchmarks.wire import Wire, local_wire
from replay.journal.reader import JournalReader
from replay.lease_ids import LeaseId

PRODUCERS, KILLED = 20, 18
SLOTS, WAITING = 8, 2  # groups that a producer makes at once, and leases that it has besides
GROUP_S, MINUTE_S = 4.0, 60.0  # simulated; a group takes between half and one and a half of this
_HEARTBEAT_S = (1.0, 6.0)  # simulated, as is the default
_SILENT = 6
_GROUPS_PER_STEP, _MAX_STALENESS = 100, 2  # so that one and a half of what the fleet holds may be out
_TOKENS = SHAPE.num_generations * SHAPE.max_completion_length
_ORPHANS_S = 120.0  # at the end, until what killed producers had is answered


@dataclass
class Process:
    """One producer, from its start to its end. Times are of CLOCK_MONOTONIC."""

    pid: int
    stdin: int
    news: Path
    began: float
    ended: float = float("inf")
    was_killed: bool = False


@dataclass(frozen=True)
class Lease:
    """What became of one lease of one process."""

    prompt_id: int
    given: float
    began: float
    due: float
    ended: float  # of the process
    was_killed: bool
    outcome: str  # "": no answer was acknowledged

    @property
    def tokens(self) -> float:
        """That were generated for it."""
        return _TOKENS * min(1.0, max(0.0, (self.ended - self.began) / (self.due - self.began)))

    @property
    def is_in_flight(self) -> bool:
        """At a kill."""
        return self.was_killed and not self.outcome


@dataclass
class Fleet:
    """Producers that come and go. Use it as a context manager."""

    wire: Wire
    folder: Path
    group_s: float  # of the clock on the wall, as everything here
    seed: int
    processes: list[Process] = field(default_factory=list)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process.pid, signal.SIGKILL)
                os.waitpid(process.pid, 0)

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process.ended == float("inf")]

    def start(self) -> None:
        number = len(self.processes)
        job = load.Load(
            [f"spot-1-{number:04x}"], self.wire.endpoint, self.wire.blob_endpoint, self.wire.keys, 0.0, SLOTS + WAITING,
            float("inf"), self.seed * 100_000 + number, str(self.folder / f"{number}.npy"),
            slots=SLOTS, group_s=self.group_s, news=str(self.folder / f"{number}.news"),
        )  # fmt: skip
        reading, writing = os.pipe()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            for process in self.living:
                os.close(process.stdin)
            os.close(writing)
            os.dup2(reading, 0)
            _live(job, began)
        os.close(reading)
        self.processes.append(Process(pid, writing, Path(job.news or ""), began))

    def kill(self, process: Process, *, silently: bool) -> None:
        os.kill(process.pid, signal.SIGSTOP if silently else signal.SIGKILL)
        process.ended, process.was_killed = time.monotonic(), True
        os.close(process.stdin)

    def add_dead_letter(self) -> None:
        """Ends those that were only stopped."""
        for process in self.processes:
            if process.was_killed:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)

    def stop(self) -> None:
        """All that live deliver what is finished, and leave."""
        for process in self.living:
            process.ended = time.monotonic()
            os.close(process.stdin)
            _, status = os.waitpid(process.pid, 0)
            if status:
                raise RuntimeError(f"a producer failed with exit code {os.waitstatus_to_exitcode(status)}")

    def leases(self) -> Iterator[Lease]:
        for process in self.processes:
            yield from _leases(process)


def _live(job: load.Load, began: float) -> NoReturn:
    """What a forked process does; nothing of its parent's is ended here."""
    sys.stdin = os.fdopen(0)
    try:
        load.run(job, begins_at=began)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _leases(process: Process) -> Iterator[Lease]:
    given: dict[str, list[Any]] = {}
    outcomes: dict[str, str] = {}
    for line in process.news.read_bytes().splitlines(keepends=True) if process.news.exists() else ():
        if not line.endswith(b"\n"):
            continue  # it was killed there
        lease_id, what, *times = msgspec.json.decode(line)
        if what == "leased":
            given[lease_id] = times
        else:
            outcomes[lease_id] = what
    for lease_id, (given_at, began, due) in given.items():
        prompt_id = LeaseId.parse(lease_id).key.prompt_id
        yield Lease(prompt_id, given_at, began, due, process.ended, process.was_killed, outcomes.get(lease_id, ""))


def measure(folder: Path, minutes: int, factor: float, seed: int) -> dict[str, float]:
    """Runs for so many simulated minutes with a journal in `folder`."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        wire = stack.enter_context(local_wire(["spot"], with_keys=True))
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-bench-")))
        heartbeat_s = (_HEARTBEAT_S[0] / factor, _HEARTBEAT_S[1] / factor)
        job = Job(
            str(folder), wire.endpoint, wire.blob_endpoint, wire.keys, _GROUPS_PER_STEP, "bench",
            max_staleness=_MAX_STALENESS, heartbeat_s=heartbeat_s,
        )  # fmt: skip
        trainer = stack.enter_context(started(job, short / "trainer.log"))
        fleet = stack.enter_context(Fleet(wire, short, GROUP_S / factor, seed))
        for _ in range(PRODUCERS):
            fleet.start()
        minute_at = time.monotonic()
        for _ in range(minutes):
            minute_at += MINUTE_S / factor
            time.sleep(max(0.0, minute_at - time.monotonic()))
            fleet.add_dead_letter()
            for number, process in enumerate(chance.sample(fleet.living, KILLED)):
                fleet.kill(process, silently=number % _SILENT == 0)
                fleet.start()
        fleet.add_dead_letter()
        _wait_for_orphans(fleet, folder / "journal.sqlite")
        fleet.stop()
        state = trainer.look()
        trainer.close()
        return {"minutes": minutes, "factor": factor} | _report(fleet, folder / "journal.sqlite", state.counts, factor)


def _wait_for_orphans(fleet: Fleet, journal: Path) -> None:
    """Until every prompt that a killed producer had is answered."""
    deadline = time.monotonic() + _ORPHANS_S
    orphans = {lease.prompt_id for lease in fleet.leases() if lease.is_in_flight}
    while orphans - set(_answered(journal)) and time.monotonic() < deadline:
        time.sleep(0.2)


def _answered(journal: Path) -> list[int]:
    with closing(JournalReader(journal)) as reader:
        return [row.prompt_id for row in reader.rows() if row.outcome == "accepted" and row.dropped is None]


def _given_again_after(leases: list[Lease]) -> list[float]:
    """Seconds from a kill until each prompt that was in flight is with another producer."""
    by_prompt: defaultdict[int, list[float]] = defaultdict(list)
    for lease in leases:
        by_prompt[lease.prompt_id].append(lease.given)
    later = [
        (lease.ended, [given for given in by_prompt[lease.prompt_id] if given > lease.given])
        for lease in leases
        if lease.is_in_flight
    ]
    return [min(givens) - ended for ended, givens in later if givens]


def _report(fleet: Fleet, journal: Path, counts: dict[str, int], factor: float) -> dict[str, float]:
    prompts = _answered(journal)
    leases = list(fleet.leases())
    told = [lease.prompt_id for lease in leases if lease.outcome == "accepted"]
    orphans = {lease.prompt_id for lease in leases if lease.is_in_flight}
    again_s = _given_again_after(leases)
    in_flight = sum(lease.tokens for lease in leases if lease.is_in_flight)
    cut_at_the_end = sum(lease.tokens for lease in leases if not lease.was_killed and not lease.outcome)
    generated = sum(lease.tokens for lease in leases) - cut_at_the_end
    living_s = sum(process.ended - process.began for process in fleet.processes)
    used = _TOKENS * len(prompts)
    return {
        "kills": sum(process.was_killed for process in fleet.processes),
        "groups": len(prompts),
        "throughput": (used + cut_at_the_end) / (living_s * SLOTS / fleet.group_s * _TOKENS),
        "thrown_away": (generated - used) / in_flight,
        "in_flight_share": in_flight / generated,
        "orphans": len(orphans),
        "again_p50_s": float(np.percentile(again_s, 50)) * factor,
        "again_p99_s": float(np.percentile(again_s, 99)) * factor,
        "lost": len(set(told) - set(prompts)) + len(orphans - set(prompts)),
        "twice": len(prompts) - len(set(prompts)),
        "dead_letters": counts.get("dead_letters", 0),
        "stale": counts.get("stale", 0) + counts.get("went_stale", 0),
        "failed_released": counts.get("failed_released", 0),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/spot.json"), help="JSON file to write")
    parser.add_argument("--minutes", type=int, default=60, help="simulated (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=10.0, help="of the compression (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of kills and lengths (default: %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    made = made_on()
    with tempfile.TemporaryDirectory(prefix="bench-spot-", dir=arguments.out.parent) as folder:
        measured = measure(Path(folder), arguments.minutes, arguments.factor, arguments.seed)
    arguments.out.write_text(json.dumps(made | measured, indent=1), encoding="utf-8")
    print("\n".join(f"{name:>16}  {value:,.3f}" for name, value in measured.items()))
    if measured["lost"] or measured["twice"] or measured["dead_letters"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
