"""What a run in the cluster is: how it is started, what it needs, and what its actors tell of it.

Guarantee: values travel as JSON and are checked when they are read; none of them is a secret.
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.runtime.metrics import Status
from slipstream.cluster import MOST_PRODUCERS

TRAINER, MANAGER = "trainer", "manager"

Phase = Literal["new", "locked", "running", "pausing", "ended"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run as `slipstream cluster up` places it. Paths are those of the trainer's node.

    Args:
        folder: where the commands are started, because paths in `config` are relative to it.
        overrides: what the trainer's command gets with `--set`.
        producer_overrides: the same of producers, for what their hosts have elsewhere.
        model: folder of the base model on the producers' hosts; empty: a hub name of the configuration.
        ranks: of the trainer.
        on_gpus: each rank of the trainer has a GPU.
        gpus: of one producer.
        cpus: of one rank and of one producer.
        host: address of the node that has `run_dir`, to which the trainer is pinned.
        keys: folder with the trainer's keys.
        backup: folder for copies of the run; empty: none are made.
        least, most: bounds of the number of producers; equal ones switch scaling off.
    """

    run_dir: str
    config: str
    folder: str
    overrides: list[str]
    producer_overrides: list[str] = []
    model: str = ""
    ranks: Annotated[int, Meta(ge=1)]
    on_gpus: bool
    gpus: Annotated[int, Meta(ge=0)]
    cpus: Annotated[int, Meta(ge=1)]
    host: str
    endpoint: str
    keys: str
    backup: str = ""
    producers: Annotated[int, Meta(ge=0, le=MOST_PRODUCERS)]
    least: int
    most: int

    @property
    def trainer_needs(self) -> dict[str, float]:
        """Resources in Ray's names, all on one node."""
        return _needs(self.ranks * self.cpus, self.ranks if self.on_gpus else 0) | on_host(self.host)

    @property
    def producer_needs(self) -> dict[str, float]:
        return _needs(self.cpus, self.gpus)

    def needs(self, name: str) -> dict[str, float]:
        return self.trainer_needs if name == TRAINER else self.producer_needs


class DaemonReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of its command. Times are Unix times."""

    name: str
    phase: Phase
    node: str = ""
    pid: int | None = None
    starts: int = 0
    since: float = 0.0  # of the phase
    exit_code: int | None = None  # of the last process, negative for a signal
    message: str = ""  # its last words, or what is waited for
    draining: bool = False
    status: Status | None = None

    @property
    def is_over(self) -> bool:
        return self.phase == "ended"


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager knows.

    Args:
        missing: what has no room now, and what is free, in words.
    """

    plan: Plan
    wanted: int
    daemons: list[DaemonReport]
    unreachable: list[str] = []
    missing: str = ""

    def daemon(self, name: str) -> DaemonReport | None:
        return next((daemon for daemon in self.daemons if daemon.name == name), None)

    @property
    def trainer(self) -> DaemonReport | None:
        return self.daemon(TRAINER)


def namespace(run_dir: str | Path) -> str:
    """Of Ray, one for each run."""
    place = os.path.abspath(run_dir)
    return f"slipstream-{Path(place).name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def producer_name(number: int) -> str:
    return f"producer-{number}"


def on_host(host: str) -> dict[str, float]:
    """What binds to a host: Ray gives each node one of this."""
    return {f"node:{host}": 0.001}


def _needs(cpus: int, gpus: int) -> dict[str, float]:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
