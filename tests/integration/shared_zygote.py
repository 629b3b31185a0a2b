"""A zygote that imports nothing: a fork of one that serves every test process of a session."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from campaigns.chaos.fleet import ENVIRONMENT, Zygote

_CONNECT_S = 60.0
_LOOK_EVERY_S = 0.05


class SharedZygote(Zygote):
    """It ends with the process that asked for it, and so does what it has forked. The one that it is a fork of is started by
    whichever test process needs it first, and ends with the session.
    """

    _first: "subprocess.Popen[bytes] | None" = None

    def __init__(self, child: str) -> None:
        self._connection = self._connect(child)
        self._listen(child, self._connection.makefile("wb"), self._connection.makefile("rb"))

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_WR)
        self._reader.join(30)
        for stream in (self._requests, self._reports, self._connection):
            stream.close()

    def _connect(self, child: str) -> socket.socket:
        is_worker = "PYTEST_XDIST_WORKER" in os.environ
        session = os.environ["PYTEST_XDIST_TESTRUNUID"] if is_worker else str(os.getpid())
        owner = os.getppid() if is_worker else os.getpid()
        name, deadline = f"{child}-{session}", time.monotonic() + _CONNECT_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(f"\0{name}")
                return connection
            except ConnectionRefusedError:
                connection.close()
            self._first = self._first or _start(child, owner, name)
            assert self._first.poll() in (None, 0), f"the zygote of {child} has ended"
            assert time.monotonic() < deadline, f"the zygote of {child} did not begin"
            time.sleep(_LOOK_EVERY_S)


def _start(child: str, owner: int, name: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "campaigns.chaos.zygote", child, str(owner), name],
        stdin=subprocess.PIPE,  # as of its forks, Python asks once whether they can seek
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
