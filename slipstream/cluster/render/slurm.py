"""A run as jobs of SLURM.

Guarantee: pure. The trainer stays on the node that has run_dir; jobs are queued again unless a new start cannot cure what ended
them, and producers only while there is a trainer's job.
"""

import contextlib
import ipaddress
from pathlib import Path

from protocol.errors import ConfigError
from slipstream.cluster.render.deployment import Deployment
from slipstream.cluster.render.templates import fill

TEMPLATES = ("submit.sh", "trainer.sbatch", "producers.sbatch")


def render(deployment: Deployment, out: Path) -> dict[str, bytes]:
    """The content of each file, by its name in `out`, which every node sees under this path.

    Raises:
        ConfigError: the trainer's node has no name.
    """
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(deployment.host.strip("[]"))
        raise ConfigError(
            f"SLURM knows nodes by their names: say with --trainer-node which one is {address} and has run_dir"
        )
    values = {
        "name": deployment.name,
        "size": deployment.size,
        "num_producers": deployment.size.num_producers,
        "host": deployment.host,
        "address": deployment.address,
        "rendezvous": deployment.rendezvous,
        "folder": deployment.folder,
        "programs": deployment.programs,
        "config_file": deployment.config_file,
        "run_dir": deployment.folder / deployment.config.run_dir,
        "overrides": deployment.trainer_overrides(f"{out}/keys"),
        "model": deployment.model_folder,
        "server_files": deployment.server_files,
        "out": out,
    }
    return {"keys.sh": fill("keys.sh", **values)} | {name: fill(f"slurm/{name}", **values) for name in TEMPLATES}
