"""What of a run the files for a scheduler need to know, taken from its configuration and the command line.

Guarantee: a `Deployment` that exists can be rendered; what contradicts itself, or cannot be reached from other machines, was
refused with the fix.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.config.data import is_local
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from slipstream.cluster.server_files import ADAPTER_DIR, server_files

PORT = 5557  # of a trainer whose configuration names none
_TCP = "tcp://"


@dataclass(frozen=True)
class Size:
    """How much of a cluster a run takes.

    Args:
        num_ranks: of the trainer, on each of its nodes.
        on_gpus: each rank of the trainer has a GPU.
        num_gpus: of each producer.
        num_cpus: of each producer and each rank.
    """

    num_producers: int = 1
    num_nodes: int = 1
    num_ranks: int = 1
    on_gpus: bool = True
    num_gpus: int = 1
    num_cpus: int = 1


def plain(path: Path) -> Path:
    """Returns it, or raises `ConfigError` if a scheduler or a unit would read something else into it."""
    if re.fullmatch(r"[A-Za-z0-9/._+-]+", str(path)):
        return path
    raise ConfigError(f"{path}: in the files of a scheduler a path has letters, digits and /._+- only; move it")


@dataclass(frozen=True)
class Deployment:
    """One run on many machines. Paths are absolute.

    Args:
        folder: where the trainer starts, and where relative names of the configuration begin.
        programs: folder of `rl-trainer` and `rl-producer`.
        overrides: of the configuration, as `--set` takes them.
        host: of the trainer, as others reach it, or as ssh does.
    """

    config: RunConfig
    config_file: Path
    folder: Path
    programs: Path
    size: Size
    host: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, config: RunConfig, config_file: str, size: Size, host: str | None, overrides: Sequence[str]
    ) -> "Deployment":
        """
        Args:
            host: what `--trainer-node` says.

        Raises:
            ConfigError: producers could not find the trainer.
        """
        endpoint = config.transport.endpoint or ""
        if endpoint.startswith(_TCP):
            host = host or endpoint.removeprefix(_TCP).rpartition(":")[0]
        if not host:
            raise ConfigError(
                "where does the trainer run? Name its node with --trainer-node, or its address with transport.endpoint, such as "
                f"tcp://10.0.0.5:{PORT}"
            )
        if not re.fullmatch(r"([a-z_][a-z0-9_-]*@)?[A-Za-z0-9\[][A-Za-z0-9.:\]-]{0,252}", host):
            raise ConfigError(f"--trainer-node {host}: expected the name or address of a machine")
        folder, programs = plain(Path.cwd()), plain(Path(sys.executable).parent)
        return cls(config, plain(Path(os.path.abspath(config_file))), folder, programs, size, host, tuple(overrides))

    @property
    def model_folder(self) -> Path | None:
        """The base model, where it is a folder of this machine."""
        name = self.config.model.path
        place = self.folder / Path(name).expanduser()
        return plain(Path(os.path.abspath(place))) if is_local(name, self.folder) else None

    @property
    def server_files(self) -> dict[str, Path]:
        """What clients of a server need, by the keys of `engine_server`."""
        return {key: plain(place) for key, place in server_files(self.config).items()}

    @property
    def adapter_dir(self) -> Path | None:
        """Where policies are handed to servers."""
        return self.server_files.get(ADAPTER_DIR)

    @property
    def server_secrets(self) -> dict[str, Path]:
        """Files with which clients know servers, and are known to them."""
        return {key: place for key, place in self.server_files.items() if key != ADAPTER_DIR}

    @property
    def name(self) -> str:
        """The name of the run for a scheduler: letters, digits and `-`, and another one for each `run_dir`."""
        place = os.path.abspath(self.folder / self.config.run_dir)
        words = re.findall(r"[a-z0-9]+", Path(place).name.lower())
        return f"{'-'.join(['rl', *words])[:31].rstrip('-')}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"

    @property
    def _has_address(self) -> bool:
        return (self.config.transport.endpoint or "").startswith(_TCP)

    @property
    def port(self) -> int:
        """Adapters travel over the next one; the trainer's nodes meet at the one after that."""
        return int(self.config.control_endpoint.rpartition(":")[2]) if self._has_address else PORT

    @property
    def address(self) -> str:
        """Where producers find the trainer."""
        return (
            self.config.control_endpoint if self._has_address else f"{_TCP}{self.host.rpartition('@')[2]}:{self.port}"
        )

    @property
    def rendezvous(self) -> str:
        return f"{self.address.removeprefix(_TCP).rpartition(':')[0]}:{self.port + 2}"

    def trainer_overrides(self, keys: str, *, everywhere: bool = False) -> list[str]:
        """What `--set` must say so that producers of other machines can reach the trainer.

        Args:
            keys: folder of keys there.
            everywhere: listen at all addresses, whatever the configuration says.
        """
        found = [*self.overrides, f"transport.keys={keys}"]
        if everywhere or not self._has_address:
            found.append(f"transport.endpoint={_TCP}0.0.0.0:{self.port}")
        return found
