"""`rl-cluster render`: writes what SLURM, Kubernetes, or ssh and systemd need to start a run.

Guarantee: nothing is started. What cannot work is refused before a file is written.
"""

import argparse
from functools import partial
from pathlib import Path

from protocol.command_line import add_config
from protocol.config.loader import load_config
from protocol.errors import ConfigError, ExitCode
from slipstream.cluster.gpu_use import check_gpu_use, producer_gpus
from slipstream.cluster.probe import file_system, is_on_network
from slipstream.cluster.render import kubernetes, slurm, ssh
from slipstream.cluster.render.deployment import Deployment, Size, plain
from slipstream.cluster.render.run_files import run_files
from slipstream.cluster.render.shared_folder import OF_A_POD, OF_A_UNIT, check_shared, check_visible
from slipstream.cluster.render.written import write
from slipstream.command import whole
from slipstream.tables import say

_BEGINS = {"slurm": "submit.sh", "kubernetes": "apply.sh", "ssh": "start.sh"}
_NUMBERS = (
    ("producers", None, 1, "(default: producers.min, or 1)"),
    ("ranks", 1, 1, "of the trainer on each of its nodes, each on a GPU (default: 1)"),
    ("gpus", 1, 0, "of each producer with an engine of its own; 0: everything computes on the CPU (default: 1)"),
    ("cpus", 8, 1, "of each producer and each rank (default: 8)"),
    ("nodes", 1, 1, "of the trainer (default: 1)"),
)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "render", help="write files that start a run under SLURM, Kubernetes, or ssh and systemd"
    )
    parser.add_argument("target", choices=tuple(_BEGINS))
    add_config(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the files")
    for flag, default, least, text in _NUMBERS:
        number = partial(whole, least=least, most=4096)
        parser.add_argument(f"--{flag}", metavar="N", type=number, default=default, help=text)
    parser.add_argument(
        "--trainer-node", metavar="HOST", help="that has run_dir (default: the host of transport.endpoint)"
    )
    parser.add_argument("--hosts", metavar="HOST", nargs="+", help="of the producers, as ssh takes them")
    parser.add_argument(
        "--prefix",
        metavar="DIR",
        type=Path,
        default=Path("/opt/slipstream"),
        help="for ssh: the virtual environment on every host (default: %(default)s)",
    )
    parser.set_defaults(work=_render)


def _render(chosen: argparse.Namespace) -> ExitCode:
    config = load_config(chosen.config, chosen.overrides)
    check_gpu_use(config, chosen.gpus)
    on_gpus, gpus = chosen.gpus > 0, producer_gpus(config, chosen.gpus)
    producers = chosen.producers or (config.producers.min if config.producers else 1)
    size = Size(producers, chosen.nodes, chosen.ranks, on_gpus, gpus, chosen.cpus)
    host = chosen.trainer_node or ("trainer" if chosen.target == "kubernetes" else None)
    deployment = Deployment.of(config, chosen.config, size, host, chosen.overrides)
    out = plain(chosen.out.resolve())
    match chosen.target:
        case "slurm":
            _check_disk(deployment)
            check_shared(deployment, beside=out)
            files = slurm.render(deployment, out)
        case "kubernetes":
            check_visible(deployment, OF_A_POD, "a pod")
            files = kubernetes.render(deployment, run_files(deployment))
        case _:
            if not chosen.hosts:
                raise ConfigError("where do the producers run? Name each host with --hosts, as ssh takes it")
            check_visible(deployment, OF_A_UNIT, "a systemd unit")
            check_shared(deployment)
            files = ssh.render(deployment, plain(chosen.prefix), chosen.hosts, run_files(deployment))
    write(out, files | {"run_name": f"{deployment.name}\n".encode()})  # another run's folder is refused
    say(f"{out}: {', '.join(sorted(files))}; read them, then run {out / _BEGINS[chosen.target]}")
    return ExitCode.OK


def _check_disk(deployment: Deployment) -> None:
    """Of run_dir, as this machine sees it."""
    place = deployment.folder / deployment.config.run_dir
    if is_on_network(kind := file_system(place)):
        raise ConfigError(
            f"run_dir: {place} is on a network file system ({kind}), where the journal is not safe; give the trainer a folder "
            "on a local disk of its node: --set run_dir=/LOCAL/FOLDER"
        )
