"""`rl-cluster render`: writes what SLURM, Kubernetes, or ssh and systemd need to start a run.

Guarantee: nothing is started. What cannot work is refused before a file is written.
"""

import argparse
from functools import partial
from pathlib import Path

from protocol.config.loader import load_config
from protocol.errors import ExitCode
from protocol.service.command_line import add_config
from tools.cluster.render import kubernetes, slurm, ssh
from tools.cluster.render.deployment import Deployment, Size, plain
from tools.cluster.render.run_files import run_files
from tools.cluster.render.written import write
from tools.command import whole
from tools.tables import say

_FIRST = {"slurm": "submit.sh", "kubernetes": "apply.sh", "ssh": "start.sh"}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("render", help="write files for SLURM, Kubernetes, or ssh and systemd")
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    for target, text in (
        ("slurm", "sbatch scripts"),
        ("kubernetes", "manifests"),
        ("ssh", "scripts that bring systemd's units to their hosts"),
    ):
        one = targets.add_parser(target, help=text)
        add_config(one)
        one.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the files")
        one.add_argument(
            "--producers", metavar="N", type=partial(whole, least=1, most=4096), help="(default: producers.min, or 1)"
        )
        for flag, default, least, text in (
            ("ranks", 1, 1, "of the trainer on each of its nodes, each on a GPU (default: 1)"),
            ("gpus", 1, 0, "of each producer; 0: everything computes on the CPU (default: 1)"),
            ("cpus", 8, 1, "of each producer and each rank (default: 8)"),
            ("nodes", 1, 1, "of the trainer (default: 1)"),
        ):
            one.add_argument(
                f"--{flag}", metavar="N", type=partial(whole, least=least, most=4096), default=default, help=text
            )
        one.add_argument(
            "--trainer-node", metavar="HOST", help="that has run_dir (default: the host of transport.endpoint)"
        )
        if target == "ssh":
            one.add_argument(
                "--hosts", metavar="HOST", nargs="+", required=True, help="of the producers, as ssh takes them"
            )
            one.add_argument(
                "--prefix", metavar="DIR", type=Path, default=Path("/opt/slipstream"),
                help="virtual environment on every host (default: %(default)s)",
            )  # fmt: skip
        one.set_defaults(work=_render)


def _render(chosen: argparse.Namespace) -> ExitCode:
    config = load_config(chosen.config, chosen.overrides)
    producers = chosen.producers or (config.producers.min if config.producers else 1)
    size = Size(producers, chosen.nodes, chosen.ranks, chosen.gpus, chosen.cpus)
    host = chosen.trainer_node or ("trainer" if chosen.target == "kubernetes" else None)
    deployment = Deployment.of(config, chosen.config, size, host, chosen.overrides)
    out = plain(chosen.out.resolve())
    match chosen.target:
        case "slurm":
            files = slurm.render(deployment, out)
        case "kubernetes":
            files = kubernetes.render(deployment, run_files(deployment))
        case _:
            files = ssh.render(deployment, chosen.prefix, chosen.hosts, run_files(deployment))
    write(out, files)
    say(f"{out}: {', '.join(sorted(files))}; read them, then run {out / _FIRST[chosen.target]}")
    return ExitCode.OK
