"""What the command lines of the tools share (`rl-journal`, `rl-status`, `rl-reward`, `rl-environment`).

Guarantee: a wrong argument is one line on standard error that names the help, a `SlipstreamError` one line and its own exit code,
every other exception a traceback and `ExitCode.BUG`. Whoever reads the output, `head` perhaps, may see enough before its end.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from protocol.errors import ExitCode, SlipstreamError


class ToolParser(argparse.ArgumentParser):
    """Its subcommands' parsers are of this class, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"{self.prog.split()[0]}: error: {message}; see {self.prog} --help\n")


def run_tool(program: str, work: Callable[[], int], interrupted: ExitCode = ExitCode.INTERRUPTED) -> int:
    """The exit code of `work`, or of how it ended.

    Args:
        interrupted: the code of an interrupt.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return interrupted
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception:
        traceback.print_exc()
        sys.stderr.write(f"{program}: this is a bug; please report it with the traceback above\n")
        return ExitCode.BUG
