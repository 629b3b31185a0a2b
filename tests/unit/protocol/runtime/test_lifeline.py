"""A child whose parent died before the child could tie itself to it ends, whoever has taken it over."""

import os
import subprocess
import sys

PROGRAM = """
import os
from protocol.runtime.processes import follow_parent_if_tied
follow_parent_if_tied()
print(os.environ["SLIPSTREAM_FOLLOW_PARENT"] == str(os.getpid()))
"""


def child_of(pid: int) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"SLIPSTREAM_FOLLOW_PARENT": str(pid)}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)


def test_a_child_of_a_dead_parent_ends() -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    assert (child_of(dead.pid).returncode, child_of(dead.pid).stdout) == (1, "")


def test_a_child_of_a_parent_that_lives_is_a_parent_in_its_turn() -> None:
    assert (child_of(os.getpid()).returncode, child_of(os.getpid()).stdout) == (0, "True\n")
