"""The `rl-producer` command.

Guarantee: heavy libraries are imported after the configuration was accepted. Where vLLM spawns its engine core instead of
forking it, multiprocessing imports this module first, so that the core is tied to the daemon's life from the start. A producer
that got its configuration from a trainer which has another one now starts again with that: the same command in the same process,
after everything was ended as for a stop, so a supervisor does not notice.
"""

import argparse
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from protocol import command_line
from protocol.config.functions import load_plugin
from protocol.config.run import RunConfig
from protocol.errors import BundleChangedError, ExitCode
from protocol.runtime.processes import follow_parent_if_tied
from protocol.runtime.signals import end_on_signals

follow_parent_if_tied()

logger = logging.getLogger("producer.app.cli")  # also where this module is the main one


class _Start:
    """State of a start. `bundle` is the digest of the trainer's bundle, and `is_outdated` says that the trainer has another."""

    def __init__(self) -> None:
        self.bundle = ""
        self.is_outdated = False

    @contextmanager
    def load(self, arguments: argparse.Namespace) -> Iterator[RunConfig]:
        joined = load_plugin("slipstream.bundles", "joined", "--connect")
        with joined(arguments) as (config, self.bundle):
            yield config

    def run(self, config: RunConfig, gpus: list[int]) -> ExitCode:
        from producer.app.daemon import run

        try:
            return run(config, gpus, self.bundle)
        except BundleChangedError as change:
            logger.info("%s", change)
            self.is_outdated = True
            return ExitCode.OK


def _needs_gpu(config: RunConfig) -> bool:
    return config.engine_server is None


def main() -> NoReturn:
    faulthandler.enable(2)  # also for the watchdog of systemd, which sends SIGABRT
    command_line.leave(command())


def command() -> int:
    """The exit code, unless another command takes the place of this one."""
    environment = dict(os.environ)
    arguments = _parser().parse_args()
    end_on_signals(ExitCode.INTERRUPTED if arguments.check else ExitCode.OK)  # until there is work to hand back
    start = _Start()
    load = start.load if arguments.connect else None
    code = command_line.main(arguments, "rl-producer", start.run, load, needs_gpu=_needs_gpu)
    if start.is_outdated:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606
    return code


def _parser() -> argparse.ArgumentParser:
    description = "Generates groups of completions with vLLM, scores them and ships them to rl-trainer."
    parser = command_line.parser("rl-producer", description, connects=True)
    connecting = parser.add_argument_group("with --connect")
    connecting.add_argument(
        "--keys", metavar="FOLDER", help="of this producer's key and trainer.public (slipstream keys); needed over TCP"
    )
    connecting.add_argument(
        "--model", metavar="FOLDER", help="the base model on this host, where the trainer's is no hub name"
    )
    connecting.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="how long to wait for a trainer that does not answer; then exit code 68 (default: %(default)g)",
    )
    return parser


if __name__ == "__main__":
    main()
