"""The `rl-cluster` command.

Guarantee: `--help` imports no heavy library. Each subcommand is added by the module that does its work: `add(commands)` gives it
a parser and, as the default `work`, a function from the parsed arguments to an exit code.
"""

import argparse
import sys

from slipstream.cluster import down, logs, scale, status, up
from slipstream.cluster.render import command as render
from slipstream.command import run_tool, tool_parser

PROGRAM = "rl-cluster"


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    return run_tool(PROGRAM, lambda: int(chosen.work(chosen)))


def _parser() -> argparse.ArgumentParser:
    result = tool_parser(PROGRAM, "Runs a trainer and its producers on many machines.")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (up, status, logs, scale, down, render):
        module.add(commands)
    return result


if __name__ == "__main__":
    sys.exit(main())
