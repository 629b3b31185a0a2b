"""A run as units of systemd, which scripts bring to their hosts by ssh.

Guarantee: pure. The units are those of deploy/systemd, so restarts, drains and hardening are theirs. Each host gets its own
secret and no other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigError
from slipstream.cluster.render.deployment import Deployment, Size
from slipstream.cluster.render.templates import fill

TEMPLATES = ("start.sh", "stop.sh", "install.sh", "hosts", "trainer.conf", "producer.conf")
STATE = "/var/lib/slipstream"  # the units write nowhere else


class Place(NamedTuple):
    """Of one producer. `host` is as ssh takes it, `gpus` as `--gpu` does."""

    name: str
    host: str
    gpus: str


def render(
    deployment: Deployment, prefix: Path, hosts: Sequence[str], run_files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The content of each file, by its name.

    Args:
        prefix: the virtual environment on every host.
        hosts: of the producers.
        run_files: configuration and own Python files of the run, by names relative to its folder, the configuration first.

    Raises:
        ConfigError: the producers have no place on these hosts.
    """
    size = deployment.size
    if size.num_nodes > 1:
        raise ConfigError(
            f"--nodes {size.num_nodes}: these files have one node for the trainer; take slurm or kubernetes, or start the others "
            "by hand (docs/operations.md, A trainer on several GPUs)"
        )
    run_dir = f"{STATE}/{deployment.name}"
    values = {
        "name": deployment.name,
        "size": size,
        "num_producers": size.num_producers,
        "producers": places(size, hosts),
        "trainer": deployment.host,
        "trainer_gpus": ",".join(map(str, range(size.num_ranks))) if size.on_gpus else "cpu",
        "address": deployment.address,
        "model": deployment.model_folder,
        "adapter_dir": deployment.adapter_dir,
        "server_secrets": deployment.server_secrets,
        "prefix": prefix,
        "run_dir": run_dir,
        "config_name": next(iter(run_files)),
        "overrides": [*deployment.trainer_overrides("/etc/slipstream/keys"), f"run_dir={run_dir}"],
    }
    files = {name: fill(f"ssh/{name}", programs=prefix / "bin", **values) for name in TEMPLATES}
    files["keys.sh"] = fill("keys.sh", programs=deployment.programs, **values)
    return files | {f"run/{name}": content for name, content in run_files.items()}


def places(size: Size, hosts: Sequence[str]) -> list[Place]:
    """One producer on each host in turn, then a second one on each, on the GPUs after those of the first.

    Raises:
        ConfigError: two of them would be one unit.
    """
    if not size.num_gpus and size.num_producers > len(hosts):
        raise ConfigError(
            f"--producers {size.num_producers}: without GPUs each of the {len(hosts)} hosts has one; give more --hosts"
        )
    found = []
    for number in range(size.num_producers):
        first = number // len(hosts) * size.num_gpus
        gpus = ",".join(map(str, range(first, first + size.num_gpus))) or "cpu"
        found.append(Place(f"producer-{number}", hosts[number % len(hosts)], gpus))
    return found
