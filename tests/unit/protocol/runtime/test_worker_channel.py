"""A child process whose connection to the daemon is lost ends, and says so where the code that it runs is to blame."""

import socket
import subprocess
import sys

import pytest

from protocol.runtime.worker_channel import LOST_STATUS

_CHILD = """
import os, sys
from protocol.runtime.worker_channel import WorkerChannel
descriptor = int(sys.argv[1])
channel = WorkerChannel(descriptor)
if sys.argv[2] == "closes":
    os.close(descriptor)
channel.send_bytes(b"answer")
"""


@pytest.mark.parametrize("who", ["closes", "daemon"])
def test_only_code_that_closed_the_connection_is_blamed(who: str) -> None:
    daemon, child = socket.socketpair()
    with daemon, child:
        if who == "daemon":
            daemon.close()
        command = [sys.executable, "-c", _CHILD, str(child.fileno()), who]
        process = subprocess.run(command, pass_fds=[child.fileno()], capture_output=True, check=False, timeout=60)
    assert process.returncode == LOST_STATUS
    assert bool(process.stderr) == (who == "closes"), process.stderr
