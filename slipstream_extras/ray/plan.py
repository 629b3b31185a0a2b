"""The plan of a run in the cluster: its commands, its resources, its exit codes, and the reports of its actors.

Guarantee: values travel as JSON and are checked when they are read; none of them is a secret.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from protocol.channel.keys import AUTHORIZED, generate, write_public
from protocol.runtime.metrics import Status
from protocol.runtime.scratch import scratch_folder
from protocol.runtime.supervisor import start_command
from slipstream_extras.ray import MOST_PRODUCERS

TRAINER, MANAGER = "trainer", "manager"

Phase = Literal["new", "locked", "running", "pausing", "ended"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run as `slipstream cluster up` places it. Paths are those of the trainer's node.

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
    """The report of an actor about its command. Times are Unix times."""

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
    """The report of the manager.

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
    """Return Ray's namespace of a run."""
    place = os.path.abspath(run_dir)
    return f"slipstream-{Path(place).name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def producer_name(number: int) -> str:
    return f"producer-{number}"


def on_host(host: str) -> dict[str, float]:
    """Return the resource that binds to a host; each node of Ray has one."""
    return {f"node:{host}": 0.001}


def _needs(cpus: int, gpus: int) -> dict[str, float]:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def daemon_command(plan: Plan, name: str, gpus: Sequence[str], folder: Path, keys: Path) -> list[str]:
    """
    Args:
        gpus: as `--gpu` takes them; those that Ray gave the actor.
        folder: of the daemon, on its node.
        keys: of a producer.
    """
    return trainer_command(plan, gpus) if name == TRAINER else producer_command(plan, name, gpus, folder, keys)


def trainer_command(plan: Plan, gpus: Sequence[str]) -> list[str]:
    ranks = [] if gpus else ["--ranks", str(plan.ranks)]
    return [*start_command("rl-trainer", gpus), "--config", plan.config, *_set(*plan.overrides), "--resume", *ranks]


def producer_command(plan: Plan, name: str, gpus: Sequence[str], folder: Path, keys: Path) -> list[str]:
    """Return a producer's command. Its node needs no file of the run: configuration and code come from the trainer."""
    model = ["--model", plan.model] if plan.model else []
    own = _set(*plan.producer_overrides, f"transport.identity={name}", f"run_dir={folder}")
    return [*start_command("rl-producer", gpus), "--connect", plan.endpoint, "--keys", str(keys), *model, *own]


def _set(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def prepare(folder: Path) -> None:
    """Make the trainer's key if there is none; `ConfigError` if that cannot be written."""
    if not (folder / f"{TRAINER}.secret").exists():
        generate(folder, TRAINER)


def new_key(folder: Path, producer: str) -> dict[str, bytes]:
    """Authorize a new key, in place of the producer's last one. Returns the files that the producer needs, by name."""
    revoke(folder, producer)
    with scratch_folder() as place:
        public = generate(place, producer)
        files = {file.name: file.read_bytes() for file in place.glob(f"{producer}.*")}
    write_public(folder / AUTHORIZED / f"{producer}.public", producer, public)
    return files | {f"{TRAINER}.public": (folder / f"{TRAINER}.public").read_bytes()}


def revoke(folder: Path, producer: str) -> None:
    (folder / AUTHORIZED / f"{producer}.public").unlink(missing_ok=True)


Amounts = Mapping[str, float]
_SHOWN = ("GPU", "CPU")
_SLACK = 1e-6  # Ray counts in ten-thousandths


class Need(NamedTuple):
    what: str  # such as `the trainer`
    amounts: Amounts  # in Ray's names, all on one node


def without_place(needs: Sequence[Need], free: Mapping[str, Amounts]) -> list[Need]:
    """Return the needs that no node has room for after the others were placed, in order, each on the fullest node that holds it.

    Args:
        free: by node.
    """
    left = {node: dict(amounts) for node, amounts in free.items()}
    homeless = []
    for need in needs:
        fitting = [node for node, amounts in left.items() if _holds(amounts, need.amounts)]
        if not fitting:
            homeless.append(need)
            continue
        chosen = left[min(fitting, key=lambda node: (left[node].get("GPU", 0), left[node].get("CPU", 0)))]
        for name, amount in need.amounts.items():
            chosen[name] -= amount
    return homeless


def num_places(amounts: Amounts, free: Mapping[str, Amounts], most: int) -> int:
    """Count how many such needs fit, up to `most`."""
    return most - len(without_place([Need("", amounts)] * most, free))


def missing_text(homeless: Sequence[Need], free: Mapping[str, Amounts]) -> str:
    """Describe in words what is missing; empty if everything has a place."""
    if not homeless:
        return ""
    same: dict[str, int] = {}
    for need in homeless:
        text = f"{need.what}: needs {amounts_text(need.amounts)}"
        same[text] = same.get(text, 0) + 1
    lines = [f"{count} times {text}" if count > 1 else text for text, count in same.items()]
    found = [f"{node} has {amounts_text(amounts)} free" for node, amounts in sorted(free.items())]
    return "; ".join(lines) + " on one node. " + ("; ".join(found) or "There is no node")


def amounts_text(amounts: Amounts) -> str:
    shown = [f"{amounts.get(name, 0):g} {name}" for name in _SHOWN]
    pinned = [f"at {name.removeprefix('node:')}" for name in amounts if name.startswith("node:") and amounts[name] < 1]
    return " ".join([" and ".join(shown), *pinned])


def _holds(amounts: Amounts, need: Amounts) -> bool:
    return all(amounts.get(name, 0.0) + _SLACK >= amount for name, amount in need.items())
