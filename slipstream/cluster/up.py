"""`rl-cluster up`: places a run and watches it, or finds one that runs and goes on with it.

Guarantee: nothing is started before everything was found to have a place, and what is missing is said within a minute. The run
goes on without this process: Ctrl-C leaves it running.
"""

import argparse
import os
from pathlib import Path

from protocol.command_line import add_config
from protocol.config.loader import load_config
from protocol.errors import ExitCode
from slipstream.cluster import session
from slipstream.cluster.fleet.plan import MOST_PRODUCERS
from slipstream.cluster.gpu_use import check_gpu_use
from slipstream.command import whole
from slipstream.tables import say


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("up", help="start a run under Ray, or go on with one, and watch it")
    add_config(parser)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of Ray (default: RAY_ADDRESS, or a Ray of this machine alone)"
    )
    parser.add_argument(
        "--producers",
        metavar="N",
        type=lambda text: whole(text, 1, MOST_PRODUCERS),
        help="(default: producers.min, or 1)",
    )
    parser.add_argument(
        "--ranks", metavar="N", type=lambda text: whole(text, 1, 1024), default=1,
        help="of the trainer, each on a GPU of one node (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", metavar="N", type=lambda text: whole(text, 0, 1024), default=1,
        help="of each producer; 0: it and the trainer compute on the CPU (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--cpus", metavar="N", type=lambda text: whole(text, 1, 4096), default=1,
        help="that each producer and rank reserves, and threads that it takes (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="FOLDER", help="the base model on the producers' nodes, where it is elsewhere there"
    )
    parser.add_argument(
        "--producer-set", metavar="KEY=VALUE", action="append", default=[], dest="producer_overrides",
        help="override one value on the producers' nodes, such as a place that is another one there (may be repeated)",
    )  # fmt: skip
    parser.add_argument(
        "--trainer-node", metavar="HOST", help="address of the node that has run_dir (default: this one)"
    )
    parser.add_argument(
        "--backup", metavar="FOLDER", default="",
        help="keep two copies of the run there, made every ten minutes and at the end, on a network disk for example",
    )  # fmt: skip
    parser.add_argument("--detach", action="store_true", help="end when everything runs, without watching")
    parser.set_defaults(work=_up)


def _up(chosen: argparse.Namespace) -> ExitCode:
    config = load_config(chosen.config, chosen.overrides)
    check_gpu_use(config, chosen.gpus)
    run_dir = Path(os.path.abspath(config.run_dir))
    session.require_ray()
    starts_ray = session.find_address(run_dir, chosen.address) is None
    if starts_ray:
        producers = max(chosen.producers or 1, config.producers.max if config.producers else 1)
        session.start_here(run_dir, max(os.cpu_count() or 1, chosen.cpus * (chosen.ranks + producers)))
    with session.connected(run_dir, chosen.address) as ray:
        from slipstream.cluster.down import take_down
        from slipstream.cluster.placing import placed
        from slipstream.cluster.watching import Watch

        try:
            watch = Watch(placed(chosen, config, run_dir))
            watch.wait_until_it_runs()
        except BaseException:
            if starts_ray:
                take_down(run_dir, ray)
            raise
        if chosen.detach:
            return _leave(run_dir)
        try:
            code = watch.wait_until_it_ends()
        except KeyboardInterrupt:
            return _leave(run_dir)
        take_down(run_dir, ray)
        return code


def _leave(run_dir: Path) -> ExitCode:
    say(f"the run goes on: rl-cluster status --run {run_dir}; rl-cluster down --run {run_dir} ends it")
    return ExitCode.OK
