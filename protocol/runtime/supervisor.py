"""Starts of daemons: the command, and whether there is another one after an end.

Guarantee: a process whose exit code says that another start cannot help stays down; the others pause longer each time.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from protocol.errors import ExitCode

_SCRIPTS = {"rl-trainer": "consumer.app.cli", "rl-producer": "producer.app.cli"}
STAYS_DOWN = frozenset(
    {
        ExitCode.OK,
        ExitCode.USAGE,
        ExitCode.DATASET,
        ExitCode.DATA_FAILURES,
        ExitCode.NO_SIGNAL,
        ExitCode.NOT_FINITE,
        ExitCode.JOURNAL,
        ExitCode.CONFIG,
        ExitCode.BUNDLE,
        ExitCode.POLICY_REFUSED,
        ExitCode.INTERRUPTED,
    }
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 300.0


class Restart(NamedTuple):
    pause_s: float
    failures: int  # in a row, this one included


def restart(exit_code: int, ran_s: float, failures: int) -> Restart | None:
    """Decide what follows the end of a process; None: it stays down.

    Args:
        exit_code: negative for a signal.
        ran_s: how long the process lived.
        failures: ends in a row before this one.
    """
    if exit_code in STAYS_DOWN:
        return None
    failures = 1 if ran_s >= STEADY_S else failures + 1
    return Restart(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (min(failures, 32) - 1)), failures)


def start_command(script: str, gpus: Sequence[str]) -> list[str]:
    """Start the program by its module, because the folder of scripts need not be on the path."""
    return [sys.executable, "-P", "-m", _SCRIPTS[script], "--gpu", ",".join(gpus) or "cpu"]
