"""`rl-cluster logs`: the last lines that a daemon, or the manager, has written.

Guarantee: it reads, and control characters in a line do nothing.
"""

import argparse

from protocol.errors import ExitCode, NoAnswerError
from slipstream.cluster.fleet.plan import MANAGER
from slipstream.cluster.place import add_place, manager_of
from slipstream.command import whole
from slipstream.tables import printable, say


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("logs", help="the last lines of a daemon")
    parser.add_argument(
        "name", metavar="NAME", nargs="?", default=MANAGER,
        help="as `status` shows it: trainer, producer-1, ... (default: the manager, which says what was started and why)",
    )  # fmt: skip
    add_place(parser)
    parser.add_argument(
        "--lines", metavar="N", type=lambda text: whole(text, 1, 10_000), default=100, help="(default: %(default)s)"
    )
    parser.set_defaults(work=_logs)


def _logs(chosen: argparse.Namespace) -> ExitCode:
    with manager_of(chosen) as manager:
        if chosen.name == MANAGER:
            lines: list[str] | None = manager.last_lines(chosen.lines)
        else:
            from slipstream.cluster.fleet.actors import Actors

            lines = Actors().last_lines(chosen.name, chosen.lines)
    if lines is None:
        raise NoAnswerError(f"{chosen.name} does not run or does not answer; rl-cluster status has the names")
    for line in lines:
        say(printable(line, keep="\t"))
    return ExitCode.OK
