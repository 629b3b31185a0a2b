"""The `rl-trainer` command. Parses and checks first, imports the heavy libraries after."""

import argparse
import faulthandler
import os
from pathlib import Path
from typing import NoReturn

from protocol.command_line import leave, parser
from protocol.command_line import main as run_command
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ExitCode
from protocol.runtime.processes import gc_disabled
from protocol.runtime.signals import end_on_signals

_DEFAULT_GPU = "1, or 0 where there is no second one or pipeline.gpu shares it"


def _prepare(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Choose a GPU if none is named (a producer's default is 0), and count the ranks."""
    from protocol.config.trainer_keys import of_spread_weights
    from protocol.gpu.nvml import VISIBLE, visible_gpus

    if arguments.gpu is None:
        alone = config.pipeline.gpu != "own" or len(visible_gpus(os.environ.get(VISIBLE))) < 2
        arguments.gpu = "0" if alone else "1"
    arguments.num_ranks = arguments.nodes * (arguments.ranks or arguments.gpu.count(",") + 1)
    if arguments.num_ranks > 1 and config.spreads_weights and (problems := list(of_spread_weights(config.trainer))):
        raise ConfigError("; ".join(problems))


def main() -> NoReturn:
    arguments = _parser().parse_args()
    faulthandler.enable(2)  # also for the watchdog of systemd, which sends SIGABRT
    end_on_signals(ExitCode.INTERRUPTED if arguments.check else ExitCode.OK)  # until there is work to end

    def run(config: RunConfig, gpus: list[int]) -> ExitCode:
        from consumer.ranks.placement import Nodes, Placement

        nodes = Nodes.of(arguments.nodes, arguments.node_rank, arguments.rendezvous)
        placement = Placement.of(gpus, arguments.ranks, nodes)
        if nodes.rank > 0:
            with gc_disabled():
                from consumer.ranks.host import run_host

            return run_host(config, placement)
        os.environ.update(placement.environment(0))
        with gc_disabled():
            from consumer.app.daemon import run

        return run(config, placement, resume=arguments.resume, source=arguments.from_journal)

    leave(run_command(arguments, "rl-trainer", run, prepare=lambda config: _prepare(config, arguments)))


def _parser() -> argparse.ArgumentParser:
    result = parser("rl-trainer", "Trains a model with GRPO on groups that rl-producer generates.", gpu=_DEFAULT_GPU)
    result.add_argument(
        "--resume",
        action="store_true",
        help="go on from what run_dir holds: the newest checkpoint and the journal; start anew if there is nothing",
    )
    result.add_argument(
        "--from-journal",
        metavar="RUN_DIR",
        type=lambda folder: Path(folder).absolute(),
        help="train again, without producers, what the journal of that run recorded; the result goes to this run's run_dir",
    )
    result.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="processes that share every step on the CPU (default: 1); on GPUs one for each",
    )
    result.add_argument(
        "--nodes",
        metavar="N",
        type=int,
        default=1,
        help="hosts that share every step, each with this command (default: 1)",
    )
    result.add_argument(
        "--node-rank",
        metavar="K",
        type=int,
        default=0,
        help="number of this host; host 0 has run_dir and sockets (default: 0)",
    )
    result.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the others find host 0, on a network that only the hosts of this run reach",
    )
    return result


if __name__ == "__main__":
    main()
