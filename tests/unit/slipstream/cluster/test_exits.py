"""Which ends of a command are final, and how long the pause is before the others come back."""

import re
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from slipstream.cluster.plan import STAYS_DOWN, Restart, restart

UNIT = Path(__file__).parents[4] / "deploy/systemd/common.conf"


@pytest.mark.parametrize("code", sorted(STAYS_DOWN))
def test_what_a_start_cannot_cure_stays_down(code: ExitCode) -> None:
    assert restart(code, 1000.0, 0) is None


@pytest.mark.parametrize("code", [-9, -15, *sorted(set(ExitCode) - STAYS_DOWN), 99])
def test_the_rest_comes_back(code: int) -> None:
    assert restart(code, 10.0, 0) == Restart(1.0, 1)


def test_pauses_double_to_a_minute_and_begin_anew_after_steady_work() -> None:
    pauses, failures = [], 0
    for _ in range(9):
        again = restart(-9, 1.0, failures)
        assert again is not None
        failures = again.failures
        pauses.append(again.pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert restart(-9, 300.0, failures) == Restart(1.0, 1)
    assert restart(70, 1.0, 10**9) == Restart(60.0, 10**9 + 1)


def test_it_is_the_policy_of_the_systemd_units() -> None:
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)
    of_success = {ExitCode.OK, ExitCode.INTERRUPTED}
    assert {int(code) for code in codes.split()} == STAYS_DOWN - of_success
