"""Whether a command that ended is started again, and when.

Guarantee: pure. What a new start cannot cure stays down with its message; the list is that of the systemd units. Everything
else comes back, after pauses that double up to a minute and begin anew after five minutes of work.
"""

from typing import NamedTuple

from protocol.errors import ExitCode

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
        ExitCode.INTERRUPTED,
    }
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 300.0


class Restart(NamedTuple):
    pause_s: float
    failures: int  # in a row, this one included


def restart(exit_code: int, ran_s: float, failures: int) -> Restart | None:
    """What follows the end of a process, or None if it stays down.

    Args:
        exit_code: negative for a signal.
        ran_s: how long the process lived.
        failures: ends in a row before this one.
    """
    if exit_code in STAYS_DOWN:
        return None
    failures = 1 if ran_s >= STEADY_S else failures + 1
    return Restart(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (min(failures, 32) - 1)), failures)
