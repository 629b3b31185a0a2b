"""What the command lines of the tools share (`rl-journal`, `rl-status`, `rl-reward`, `rl-environment`).

Guarantee: a wrong argument is one line on standard error that names the help, a `SlipstreamError` one line and its own exit
code, a file that the system refuses one line and `ExitCode.CONFIG`, every other exception a traceback and `ExitCode.BUG`. A
reader of the output that ends early, such as `head`, is no error.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from protocol import __version__
from protocol.command_line import exit_code, written
from protocol.errors import ExitCode


class ToolParser(argparse.ArgumentParser):
    """The parser of a tool; those of its subcommands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"{self.prog.split()[0]}: error: {message}; see {self.prog} --help\n")


def tool_parser(program: str, description: str) -> ToolParser:
    result = ToolParser(prog=program, description=description)
    result.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return result


def add_run(parser: argparse.ArgumentParser, run: str, default: str | None = None) -> None:
    """Adds the arguments that say which run is meant. `run` says what `--run` names."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--run", metavar="RUN_DIR", default=default, help=f"{run} (default: this folder)")
    place.add_argument("--config", metavar="FILE", default=default, help="the run's YAML file, instead of --run")


def run_place(chosen: argparse.Namespace) -> Path:
    """The folder of that run, or what else `--run` names; `ConfigError` if the configuration cannot be read."""
    if chosen.config is None:
        return Path(chosen.run or ".")
    from protocol.config.loader import load_config  # its import takes as long as all others

    return Path(load_config(chosen.config).run_dir)


def whole(text: str, least: int = 0, most: int = 999_999_999_999) -> int:
    if text.isdecimal() and len(text) <= 12 and least <= int(text) <= most:
        return int(text)
    bounds = f" from {least} to {most}" if least else ""
    raise argparse.ArgumentTypeError(f"expected a whole number{bounds} (got {text!r})")


def run_tool(program: str, work: Callable[[], int], interrupted: ExitCode = ExitCode.INTERRUPTED) -> int:
    """Runs `work` and returns its exit code, or the one of the error or interrupt that ended it."""
    return exit_code(program, lambda: written(work), interrupted)
