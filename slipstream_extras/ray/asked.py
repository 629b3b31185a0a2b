"""A run as the options of `slipstream cluster up` and the configuration ask for it.

Guarantee: pure. Paths are absolute, because daemons start in other folders. What contradicts itself is refused.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from protocol import __version__
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, IncompatiblePeerError
from slipstream_extras.ray.plan import Plan

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "virtiofs", "glusterfs", "panfs",
    "orangefs", "pvfs2", "ocfs2", "gfs2", "fuse",
}  # fmt: skip


_PORTS = range(20_000, 30_000, 2)  # outside of those that the kernel gives to connections
_TRIES = 1000


class NodeFacts(msgspec.Struct, frozen=True):
    """Args:
    file_system: of run_dir.
    config: sha256 of the configuration file; None: there is none.
    has_journal: whether a run is in run_dir.
    port: the first of two free ones in a row.
    """

    host: str
    release: str
    file_system: str
    config: str | None
    has_journal: bool
    port: int


def look(host: str, run_dir: str, config: str) -> bytes:
    """Return `NodeFacts` of this node as JSON."""
    place = Path(run_dir)
    facts = NodeFacts(host, __version__, file_system(place), digest(config), _has_journal(place), _free_port())
    return msgspec.json.encode(facts)


def check(facts: NodeFacts, run_dir: str, config: str) -> None:
    """Check the node's facts where `slipstream cluster up` runs.

    Raises:
        ConfigError: the run cannot be on that node.
        IncompatiblePeerError: it has another release.
    """
    host = facts.host
    if facts.release != __version__:
        raise IncompatiblePeerError(
            f"the trainer's node {host} has Slipstream {facts.release}, this one {__version__}; install the same on all nodes"
        )
    if is_on_network(facts.file_system):
        raise ConfigError(
            f"run_dir: {run_dir} is on a network file system ({facts.file_system}) at {host}, where no journal is safe. Give "
            "the trainer a folder on a local disk: --trainer-node ADDRESS --set run_dir=/LOCAL/FOLDER, and keep copies here: "
            f"--backup {run_dir}"
        )
    if facts.config is None:
        raise ConfigError(f"--config {config}: there is no such file on the trainer's node {host}; copy it there")
    if facts.config != digest(config):
        raise ConfigError(
            f"--config {config}: the file on the trainer's node {host} is another one; copy this one there"
        )
    if _has_journal(Path(run_dir)) and not facts.has_journal:
        raise ConfigError(
            f"run_dir: this machine has the run in {run_dir}, and the trainer's node {host} has not. Name the node that has it "
            "with --trainer-node, or move it: slipstream journal backup"
        )


def file_system(place: Path) -> str:
    """The kind of the file system that `place` is on, or will be."""
    return mount_of(place)[1]


def mount_of(place: Path) -> tuple[str, str]:
    """Return the place where the file system of `place` is mounted, and its kind."""
    path = os.path.realpath(place)
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    found = max((mount for mount in mounts if _is_below(path, mount)), key=len, default="/")
    return found, mounts.get(found, "unknown")


def is_on_network(kind: str) -> bool:
    """FUSE counts as a network, but for a disk (`fuseblk`): mostly it is one, and SQLite's log needs more than it gives."""
    return kind in _NETWORK or kind.startswith("fuse.")


def digest(file: str) -> str | None:
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return None


def _is_below(path: str, mount: str) -> bool:
    return os.path.commonpath([path, mount]) == mount


def _has_journal(run_dir: Path) -> bool:
    return (run_dir / "journal.sqlite").exists()


def _free_port() -> int:
    """Return a port that stays free while a trainer starts again. Adapters travel over the next one."""
    for _ in range(_TRIES):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if _is_free(port) and _is_free(port + 1):
            return port
    raise ConfigError(f"no two free ports from {_PORTS[0]} to {_PORTS[-1]} were found; set transport.endpoint")


def _is_free(port: int) -> bool:
    with socket.socket() as tried, contextlib.suppress(OSError):
        tried.bind(("", port))
        return True
    return False


_KEYS = ("adapter_dir", "key_file", "ca_file")


class Asked(NamedTuple):
    """The options of `slipstream cluster up`."""

    config: str
    overrides: list[str]
    address: str | None = None
    producers: int | None = None
    ranks: int = 1
    gpus: int = 1
    cpus: int = 1
    model: str | None = None
    producer_overrides: tuple[str, ...] = ()
    trainer_node: str | None = None
    backup: str = ""
    detach: bool = False


def check_gpu_use(config: RunConfig, num_gpus: int) -> None:
    """
    Args:
        num_gpus: of each producer; 0: everything computes on the CPU.

    Raises:
        ConfigError: trainer and producer are to be on one GPU, and Ray gives each daemon GPUs of its own.
    """
    if num_gpus and config.pipeline.gpu != "own":
        raise ConfigError(
            f"pipeline.gpu: {config.pipeline.gpu} puts trainer and producer on one GPU, and slipstream cluster gives each daemon "
            "GPUs of its own; set pipeline.gpu=own, or start the pair by hand (docs/one-gpu.md)"
        )


def producer_gpus(config: RunConfig, num_gpus: int) -> int:
    """Return the GPUs of each producer, where each is to have `num_gpus`: the clients of `engine_server` use none."""
    return 0 if config.engine_server is not None else num_gpus


def server_files(config: RunConfig) -> dict[str, Path]:
    """Return the files of `engine_server` and `teachers`, by key. Relative names begin in the working directory."""
    sections: dict[str, Any] = {"engine_server": config.engine_server}
    sections |= {f"teachers.{number}": teacher for number, teacher in enumerate(config.teachers)}
    given = {f"{name}.{key}": getattr(section, key, None) for name, section in sections.items() for key in _KEYS}
    return {key: Path(os.path.abspath(os.path.expanduser(value))) for key, value in given.items() if value is not None}


def plan_of(asked: Asked, config: RunConfig, run_dir: Path, facts: NodeFacts) -> Plan:
    """Plan the run. The daemons meet over TCP with keys, because Ray may place them on any node."""
    transport, bounds = config.transport, config.producers
    least, most = (bounds.min, bounds.max) if bounds else (0, 0)
    producers = asked.producers or max(1, least)
    if bounds and not least <= producers <= most:
        raise ConfigError(
            f"--producers {producers}: the configuration has producers.min={least} and producers.max={most}"
        )
    model = os.path.expanduser(config.model.path)
    own = transport.endpoint if (transport.endpoint or "").startswith("tcp://") and transport.keys else None
    endpoint = own or f"tcp://{facts.host}:{facts.port}"
    keys = os.path.abspath(transport.keys) if transport.keys else str(run_dir / "cluster" / "keys")
    set_here = [] if own else [f"transport.keys={keys}", f"transport.endpoint={endpoint}"]
    places = [f"{key}={json.dumps(str(place))}" for key, place in server_files(config).items()]
    return Plan(
        run_dir=str(run_dir),
        config=os.path.abspath(asked.config),
        folder=os.getcwd(),
        overrides=[*asked.overrides, *set_here],
        producer_overrides=[*places, *asked.producer_overrides],
        model=asked.model or (os.path.abspath(model) if os.path.isdir(model) else ""),
        ranks=asked.ranks,
        on_gpus=asked.gpus > 0,
        gpus=producer_gpus(config, asked.gpus),
        cpus=asked.cpus,
        host=facts.host,
        endpoint=endpoint,
        keys=keys,
        backup=os.path.abspath(asked.backup) if asked.backup else "",
        producers=producers,
        least=least,
        most=most,
    )
